// Prepared engines on disk: written whole, found again, checked, mapped.
#include "runtime/prepared_engine.hpp"

#include <array>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <set>
#include <system_error>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

namespace dsbd {

namespace {

namespace fs = std::filesystem;

constexpr const char *MODEL = "model.onnx", *WEIGHTS = "model.bin", *WHOLE = "whole.json";
constexpr const char* NEW = ".native-";  // begins the names of folders that are being written
constexpr std::pair<const char*, const char*> ENTRIES[] = {
    {"session.optimized_model_external_initializers_file_name", WEIGHTS},
    {"session.optimized_model_external_initializers_min_size_in_bytes", "1024"},
    {"session.save_external_prepacked_constant_initializers", "1"}};
constexpr double MOST_COPIES = 2.5;  // of the weights: stored, packed, and some room
constexpr double SMALLEST_ROOM = 16 << 20;

/// A checksum of 64 bits, a word at a time.
class Checksum {
public:
    void add(const char* bytes, std::size_t size) {
        for (std::size_t at = 0; at < size; at += 8) {
            std::uint64_t word = 0;
            std::memcpy(&word, bytes + at, std::min<std::size_t>(8, size - at));
            sum_ = std::rotl((sum_ ^ word) * 0x9E3779B97F4A7C15, 29);
        }
    }
    std::string hex() const {
        char text[17];
        std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(sum_));
        return text;
    }

private:
    std::uint64_t sum_ = 0x243F6A8885A308D3;
};

/// Return size and checksum of a file; an empty text if it is absent.
std::string shown_content(const fs::path& file) {
    std::ifstream stream(file, std::ios::binary);
    if (!stream) return "";
    Checksum sum;
    std::vector<char> block(1 << 20);
    std::uintmax_t size = 0;
    while (stream.read(block.data(), static_cast<std::streamsize>(block.size())), stream.gcount()) {
        const auto count = static_cast<std::size_t>(stream.gcount());
        sum.add(block.data(), count);
        size += count;
    }
    return std::to_string(size) + " " + sum.hex();
}

Json record_of(const fs::path& place) {
    return {{MODEL, shown_content(place / MODEL)}, {WEIGHTS, shown_content(place / WEIGHTS)}};
}

bool is_whole(const fs::path& place) {
    const std::optional<std::string> text = text_from_file(place / WHOLE);
    return text && Json::parse(*text, nullptr, false) == record_of(place);
}

/// The instructions and the name of the processor, which decide the choice of kernels.
std::string processor() {
    std::set<std::string> lines;
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
        for (const char* name : {"flags", "Features", "model name"}) {
            if (line.starts_with(name)) lines.insert(line);
        }
    }
    std::string all;
    for (const std::string& line : lines) all += line + "\n";
    return all;
}

std::string name_of(const Bundle& bundle, const std::string& role) {
    std::string key = "1\n" + std::string(OrtGetApiBase()->GetVersionString()) + "\n" + processor();
    for (const char* file : {"/model.onnx", "/model.onnx.data"}) {
        const Json& files = bundle.content.at("files");
        if (files.contains(role + file)) key += files.at(role + file).dump() + "\n";
    }
    key += (bundle.target.quantization + "\n") + (bundle.draft ? bundle.draft->quantization : "");
    Checksum sum, again;
    sum.add(key.data(), key.size());
    again.add(sum.hex().data(), 16);
    again.add(key.data(), key.size());
    return sum.hex() + again.hex();
}

/// A locked folder of its own, removed in the end.
class NewFolder {
public:
    explicit NewFolder(const fs::path& parent) : path_((parent / NEW).string() + "XXXXXX") {
        if (!mkdtemp(path_.data())) throw std::system_error(errno, std::generic_category());
        lock_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
        flock(lock_, LOCK_EX | LOCK_NB);
    }
    ~NewFolder() {
        std::error_code error;
        fs::remove_all(path_, error);
        close(lock_);
    }
    NewFolder(const NewFolder&) = delete;
    NewFolder& operator=(const NewFolder&) = delete;
    fs::path path() const { return path_; }

private:
    std::string path_;
    int lock_ = -1;
};

/// Remove folders that processes have left which were ended while they wrote.
void clear_abandoned(const fs::path& cache) {
    for (const fs::directory_entry& entry : fs::directory_iterator(cache)) {
        const bool is_new = entry.path().filename().string().starts_with(NEW);
        std::error_code error;
        const auto age =
            fs::file_time_type::clock::now() - fs::last_write_time(entry.path(), error);
        if (!is_new || error || age < std::chrono::minutes(1)) continue;  // may not be locked yet
        const int lock = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
        if (flock(lock, LOCK_EX | LOCK_NB) == 0) fs::remove_all(entry.path(), error);
        close(lock);
    }
}

void sync(const fs::path& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    const bool is_synced = file >= 0 && fsync(file) == 0;
    close(file);
    if (!is_synced) throw std::system_error(errno, std::generic_category(), path.string());
}

void check_room(const fs::path& cache, double num_bytes) {
    const double needed = MOST_COPIES * num_bytes + SMALLEST_ROOM;
    const auto free = static_cast<double>(fs::space(cache).available);
    if (free < needed) {
        throw std::runtime_error(std::to_string(free / 1e6) + " MB are free, it may take " +
                                 std::to_string(needed / 1e6));
    }
}

/// Write the prepared engine; any exception: it is not written.
void prepare(const Ort::Env& env, const fs::path& file, const fs::path& place,
             Ort::SessionOptions options) {
    const NewFolder folder(place.parent_path());
    const fs::path made = folder.path() / "engine";
    fs::create_directory(made);
    options.SetOptimizedModelFilePath((made / MODEL).c_str());
    for (const auto& [name, value] : ENTRIES) options.AddConfigEntry(name, value);
    {
        const Ort::Session session(env, file.c_str(), options);
    }
    std::ofstream(made / WHOLE) << record_of(made).dump();
    for (const fs::directory_entry& entry : fs::directory_iterator(made)) sync(entry.path());
    sync(made);
    std::error_code error;
    if (fs::exists(place) && !is_whole(place)) fs::remove_all(place, error);
    fs::rename(made, place, error);  // fails if another opener was first
    sync(place.parent_path());
    if (!is_whole(place)) throw std::runtime_error(place.string() + " is not what was written");
}

Ort::Session open_whole(const Ort::Env& env, const fs::path& place, Ort::SessionOptions options) {
    options.SetGraphOptimizationLevel(ORT_DISABLE_ALL);
    try {
        return Ort::Session(env, (place / MODEL).c_str(), options);
    } catch (const Ort::Exception&) {
        std::error_code error;
        fs::remove_all(place, error);
        throw;
    }
}

}  // namespace

Ort::Session open_prepared(const Ort::Env& env, const Bundle& bundle, const std::string& role,
                           const EngineSettings& settings) {
    const fs::path cache = settings.engine_cache, file = bundle.model_path(role.c_str());
    const ModelEntry& entry = role == "target" ? bundle.target : *bundle.draft;
    if (fs::exists(cache) && !fs::is_directory(cache)) {
        throw Error("engine_cache is " + cache.string() + ", which is a file; expected a folder");
    }
    const fs::path place = cache / name_of(bundle, role);
    try {
        if (!is_whole(place)) {
            fs::create_directories(cache);
            clear_abandoned(cache);
            const auto weights = bundle.size_by_file.find(role + "/model.onnx.data");
            const bool has_weights = weights != bundle.size_by_file.end();
            check_room(cache, has_weights ? static_cast<double>(weights->second) : 0.0);
            prepare(env, file, place, session_options(entry, settings));
        }
        return open_whole(env, place, session_options(entry, settings));
    } catch (const std::exception& error) {
        Ort::Session session = open_graph(env, file, entry, settings);  // Error: it is invalid
        std::cerr << "dsbd_native: cannot keep a prepared engine of " << file.string() << " in "
                  << cache.string() << " (" << error.what() << "): it opens without one; free some "
                  << "room or name another folder" << std::endl;
        return session;
    }
}

}  // namespace dsbd
