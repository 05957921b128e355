// dsbd_native BUNDLE --prompt TEXT: continue prompts with a bundle, without Python.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/noise.hpp"
#include "dsbd_native.h"

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* USAGE =
    "usage: dsbd_native BUNDLE (--prompt TEXT | --ids 1,2,3 | --input FILE.jsonl) [--chat] [--json]\n"
    "           [--stats] [--concurrency N] [--threads N] [--provider NAME] [--settings JSON]\n"
    "           [--OPTION VALUE ...]\n"
    "       dsbd_native --help | --version\n"
    "  --prompt, --ids   continue a text, or token ids; prints the text, or with ids the new ids\n"
    "  --chat            --prompt is the user's message of a chat; --system TEXT: its system message\n"
    "  --input           a request a line: \"prompt\", \"ids\" or \"messages\", and options; - is stdin\n"
    "  --json            print each answer as one object, as dsbd-run does\n"
    "  --stats           print the statistics to stderr\n"
    "  --concurrency     requests of --input that run together; usual: 1\n"
    "  --provider        where both models run: cpu, webgpu, webgpu:1, cuda; usual: cpu\n"
    "  --draft-provider  where the draft runs; usual: as --provider\n"
    "  --settings        of dsbd_open, see dsbd_native.h; --threads N: {\"num_threads\": N}\n"
    "  --OPTION VALUE    an option of dsbd-run, such as --num-beams 4, --draft-beams 6,5,4 or\n"
    "                    --stop-strings END; values are texts, numbers, lists of them, or JSON";

/// An error that the user can fix; it ends the program with exit code 2.
struct UsageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// One request: its prompt, and its options as JSON.
struct Request {
    std::optional<std::string> prompt, messages;
    std::vector<std::int64_t> ids;
    std::string options;
};

struct CommandLine {
    std::string bundle, input;
    std::optional<std::string> system;
    Request request;
    Json settings = Json::object(), options = Json::object();
    bool is_chat = false, is_json = false, has_stats = false;
    std::size_t concurrency = 1;
};

void check(dsbd_status status) {
    if (status != DSBD_OK) throw UsageError(dsbd_last_error());
}

/// A value of the command line: JSON, a list such as 6,5,4 of it, else a text.
Json value_of(const std::string& text) {
    Json parsed = Json::parse(text, nullptr, false);
    if (parsed.is_discarded() && text.find(',') != std::string::npos) {
        parsed = Json::parse("[" + text + "]", nullptr, false);
    }
    return parsed.is_discarded() ? Json(text) : parsed;
}

/// The value of an option; of one for texts a JSON string, a list of them, else the text itself.
Json option_value_of(const std::string& option, const std::string& text) {
    const bool is_text = option == "predicted_text" || option == "stop_strings" ||
                         option == "src_lang" || option == "tgt_lang";
    if (!is_text) return value_of(text);
    const Json parsed = Json::parse(text, nullptr, false);
    return parsed.is_string() || parsed.is_array() ? parsed : Json(text);
}

void set_value(CommandLine& found, const std::string& name, const std::string& text) {
    if (name == "--prompt") {
        found.request.prompt = text;
    } else if (name == "--ids") {
        const Json ids = value_of("[" + text + "]");
        if (!ids.is_array()) throw UsageError("--ids is '" + text + "'; expected 1,2,3");
        found.request.ids = ids.get<std::vector<std::int64_t>>();
    } else if (name == "--system") {
        found.system = text;
    } else if (name == "--input") {
        found.input = text;
    } else if (name == "--settings") {
        found.settings.update(Json::parse(text));
    } else if (name == "--threads") {
        found.settings["num_threads"] = value_of(text);
    } else if (name == "--provider" || name == "--draft-provider") {
        found.settings[name == "--provider" ? "provider" : "draft_provider"] = text;
    } else if (name == "--concurrency") {
        found.concurrency = value_of(text).get<std::size_t>();
    } else {
        std::string option = name.substr(2);
        for (char& c : option) c = c == '-' ? '_' : c;
        found.options[option] = option_value_of(option, text);
    }
}

/// Make the prompt the message of a user, with the defaults of a chat.
void begin_chat(CommandLine& found) {
    if (!found.request.prompt) {
        throw UsageError(
            "--chat needs --prompt, the user's message; a line of --input may have "
            "\"messages\" instead");
    }
    Json messages = Json::array();
    if (found.system) messages.push_back({{"role", "system"}, {"content", *found.system}});
    messages.push_back({{"role", "user"}, {"content", *found.request.prompt}});
    found.request.messages = messages.dump();
    found.request.prompt.reset();
    if (!found.settings.contains("chat_defaults")) found.settings["chat_defaults"] = true;
}

CommandLine command_line_of(const std::vector<std::string>& arguments) {
    CommandLine found;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        const std::string& name = arguments[i];
        if (name.rfind("--", 0) != 0) {
            if (!found.bundle.empty()) throw UsageError("a second bundle, " + name);
            found.bundle = name;
        } else if (name == "--chat") {
            found.is_chat = true;
        } else if (name == "--json") {
            found.is_json = true;
        } else if (name == "--stats") {
            found.has_stats = true;
        } else if (i + 1 == arguments.size()) {
            throw UsageError(name + " has no value\n" + USAGE);
        } else {
            set_value(found, name, arguments[++i]);
        }
    }
    const bool has_ids = !found.request.ids.empty(), has_input = !found.input.empty();
    if (found.bundle.empty() || found.request.prompt.has_value() + has_ids + has_input != 1) {
        throw UsageError(
            std::string("expected a bundle, and one of --prompt, --ids and --input\n") + USAGE);
    }
    if (found.is_chat) {
        begin_chat(found);
    } else if (found.system) {
        throw UsageError("--system needs --chat");
    }
    found.settings["max_requests"] = std::max<std::size_t>(found.concurrency, 1);
    found.request.options = found.options.dump();
    return found;
}

/// Says on stderr that a bundle is being opened, if that takes more than two seconds.
class OpeningNotice {
public:
    explicit OpeningNotice(const std::string& bundle)
        : thread_([this, bundle](const std::stop_token& is_over) { say(bundle, is_over); }) {}

private:
    void say(const std::string& bundle, const std::stop_token& is_over) {
        std::mutex mutex;
        std::unique_lock lock(mutex);
        const auto is_open = [&] { return is_over.stop_requested(); };
        if (changed_.wait_for(lock, is_over, std::chrono::seconds(2), is_open)) return;
        std::uintmax_t size = 0;
        std::error_code error;
        for (const auto& file : std::filesystem::recursive_directory_iterator(bundle, error)) {
            size += file.is_regular_file(error) ? file.file_size(error) : 0;
        }
        std::cerr << "opening " << bundle << ": reading and packing " << (size >> 20) << " MiB ..."
                  << std::endl;
    }

    std::condition_variable_any changed_;
    std::jthread thread_;  // asked to stop when the notice goes
};

/// Name the fields of generation_config.json that have no effect, on stderr.
void tell_not_built(const dsbd_pipeline* pipeline) {
    char* stats = nullptr;
    check(dsbd_stats(pipeline, &stats));
    const Json fields = Json::parse(stats)["not_built"];
    dsbd_free(stats);
    if (fields.empty()) return;
    std::cerr
        << "dsbd_native: generation_config.json has options that dsbd_native does not support "
           "and that have no effect: "
        << fields.dump() << std::endl;
}

/// Return the result of a request in JSON.
std::string answered(dsbd_pipeline* pipeline, const Request& given, dsbd_on_step on_step) {
    dsbd_request request{};
    request.options = given.options.c_str();
    request.on_step = on_step;
    if (given.prompt) request.prompt = given.prompt->c_str();
    if (given.messages) request.messages = given.messages->c_str();
    if (!given.ids.empty()) request.prompt_ids = given.ids.data();
    request.num_prompt_ids = given.ids.size();
    char* result = nullptr;
    check(dsbd_generate(pipeline, &request, &result));
    std::string text(result);
    dsbd_free(result);
    return text;
}

int print_text(const dsbd_step* step, void*) {
    std::cout << std::string_view(step->text, step->num_text_bytes) << std::flush;
    return 0;
}

void answer_one(dsbd_pipeline* pipeline, const CommandLine& command) {
    const bool has_text = command.request.prompt || command.request.messages;
    const bool streams = has_text && !command.is_json;
    const std::string result = answered(pipeline, command.request, streams ? print_text : nullptr);
    const Json object = Json::parse(result);
    if (command.is_json) {
        std::cout << result;
    } else if (!streams) {
        const Json ids = object["sequences"][0]["token_ids"];
        for (std::size_t i = 0; i < ids.size(); ++i) std::cout << (i ? "," : "") << ids[i];
    }
    std::cout << std::endl;
    if (command.has_stats) std::cerr << object["stats"].dump() << std::endl;
}

/// A line of --input, counted from 1.
struct Line {
    std::size_t number;
    std::string text;
};

/// The request of a line of --input, whose options override those of the command line.
Request request_of(const Line& line, const Json& options) {
    Json given = Json::parse(line.text);
    Request request;
    if (given.contains("prompt")) request.prompt = given["prompt"].get<std::string>();
    if (given.contains("messages")) request.messages = given["messages"].dump();
    if (given.contains("ids")) request.ids = given["ids"].get<std::vector<std::int64_t>>();
    for (const char* name : {"prompt", "messages", "ids", "id"}) given.erase(name);
    Json all = options;
    if (all.contains("seed") && all["seed"].is_number_unsigned()) {  // as dsbd-run makes seeds
        all["seed"] = dsbd::sample_seed(all["seed"].get<std::uint64_t>(), line.number);
    }
    all.update(given);
    request.options = all.dump();
    return request;
}

std::string answer_to_line(dsbd_pipeline* pipeline, const Line& line, const Json& options) {
    try {
        return answered(pipeline, request_of(line, options), nullptr);
    } catch (const UsageError& error) {
        return Json{{"version", 1}, {"error", error.what()}}.dump();
    } catch (const nlohmann::json::exception& error) {
        return Json{{"version", 1}, {"error", error.what()}}.dump();
    }
}

/// Refuse UTF-16 and UTF-32, from the first line of a file; a mark of UTF-8 is no part of its JSON.
void check_utf_8(const std::string& line, const std::string& file) {
    const std::string head = line.substr(0, 2);
    const bool is_half = line.size() > 1 && (line[0] == '\0') != (line[1] == '\0');
    if (head != "\xff\xfe" && head != "\xfe\xff" && !is_half) return;
    throw UsageError(file +
                     " is UTF-16 or UTF-32; expected UTF-8: iconv -f UTF-16 -t UTF-8 "
                     "converts it");
}

/// Answer every line, so many at a time, in their order.
void answer_file(dsbd_pipeline* pipeline, const CommandLine& command) {
    std::ifstream file;
    if (command.input != "-") {
        file.open(command.input);
        if (!file) throw UsageError("cannot read " + command.input);
    }
    std::vector<Line> lines;
    std::size_t number = 0;
    for (std::string line; std::getline(command.input == "-" ? std::cin : file, line);) {
        ++number;
        if (line.find_first_not_of(" \t\r") != std::string::npos) lines.push_back({number, line});
    }
    if (!lines.empty()) check_utf_8(lines.front().text, command.input);
    std::vector<std::string> answers(lines.size());
    std::atomic<std::size_t> next = 0;
    const auto work = [&] {
        for (std::size_t i = next++; i < lines.size(); i = next++) {
            answers[i] = answer_to_line(pipeline, lines[i], command.options);
        }
    };
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < command.concurrency; ++i) threads.emplace_back(work);
    threads.clear();  // waits for them
    for (const std::string& answer : answers) std::cout << answer << '\n';
    std::cout << std::flush;
}

}  // namespace

int main(int num_arguments, char** arguments) {
    const std::string_view first = num_arguments > 1 ? arguments[1] : "";
    if (first == "--help" || first == "-h" || first == "--version") {
        std::cout << (first == "--version" ? dsbd_version() : USAGE) << std::endl;
        return 0;
    }
    try {
        const CommandLine command = command_line_of({arguments + 1, arguments + num_arguments});
        dsbd_pipeline* pipeline = nullptr;
        {
            const OpeningNotice notice(command.bundle);
            check(dsbd_open(command.bundle.c_str(), command.settings.dump().c_str(), &pipeline));
        }
        tell_not_built(pipeline);
        if (command.input.empty()) {
            answer_one(pipeline, command);
        } else {
            answer_file(pipeline, command);
        }
        check(dsbd_close(pipeline));
        return 0;
    } catch (const UsageError& error) {
        std::cerr << "dsbd_native: " << error.what() << std::endl;
        return 2;
    } catch (const nlohmann::json::exception& error) {
        std::cerr << "dsbd_native: a value is no JSON of its type: " << error.what() << std::endl;
        return 2;
    }
}
