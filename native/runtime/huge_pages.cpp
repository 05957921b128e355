// Ranges of weights, found in the maps of the process and gathered by the kernel.
#include "runtime/huge_pages.hpp"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <chrono>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>

namespace dsbd {
namespace {

constexpr std::uintptr_t HUGE_PAGE = 2 << 20;
constexpr std::uintptr_t SMALLEST = 4 << 20;  // smaller ranges fit the TLB
constexpr std::uintptr_t AT_ONCE = 4 << 20;  // of memory: 5 to 10 ms
constexpr int PAUSE = 10;  // times as long as the memory before took: calls wait for it

/// Gather one range; the kernel refuses what is gone or cannot be gathered.
void gather_range([[maybe_unused]] std::uintptr_t begin, [[maybe_unused]] std::uintptr_t end) {
#ifdef __linux__
    constexpr int COLLAPSE = 25;  // MADV_COLLAPSE, from Linux 6.1 on
    void* const memory = reinterpret_cast<void*>(begin);
    madvise(memory, end - begin, MADV_HUGEPAGE);
    madvise(memory, end - begin, COLLAPSE);
#endif
}

bool are_offered() {
    std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
    std::string policy;
    return std::getline(file, policy) && policy.find("[never]") == std::string::npos;
}

}  // namespace

HugePages::HugePages() {
    const std::vector<Range> found = private_ranges();
    before_ = {found.begin(), found.end()};
}

HugePages::~HugePages() {
    is_over_ = true;
    if (thread_.joinable()) thread_.join();
}

void HugePages::gather() {
    if (!are_offered()) return;
    std::vector<Range> grown = private_ranges();
    std::erase_if(grown, [&](const Range& range) { return before_.contains(range); });
    std::erase_if(grown, [](const Range& range) { return range.second - range.first < SMALLEST; });
    if (grown.empty()) return;
    const auto gather_all = [this, grown = std::move(grown)] {
        for (const auto& [begin, end] : grown) {
            const std::uintptr_t stop = end / HUGE_PAGE * HUGE_PAGE;
            std::uintptr_t at = (begin + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
            for (; at < stop && !is_over_; at += AT_ONCE) {
                const auto began = std::chrono::steady_clock::now();
                gather_range(at, std::min(at + AT_ONCE, stop));
                std::this_thread::sleep_for(PAUSE * (std::chrono::steady_clock::now() - began));
            }
        }
    };
    try {
        thread_ = std::thread(gather_all);
    } catch (const std::system_error&) {
        // No more threads: the weights stay in small pages.
    }
}

/// Return the process's writeable memory that is not of files.
std::vector<HugePages::Range> HugePages::private_ranges() {
    std::vector<Range> found;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        std::istringstream words(line);
        Range range;
        char dash = 0;
        std::string mode, offset, device, inode, name;
        words >> std::hex >> range.first >> dash >> range.second >> mode >> offset >> device >>
            inode >> name;
        if (mode == "rw-p" && inode == "0" && (name.empty() || name == "[heap]")) {
            found.push_back(range);
        }
    }
    return found;
}

}  // namespace dsbd
