// Huge pages for the weights of engines (huge_pages in ort_module.py).
#pragma once

#include <atomic>
#include <cstdint>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace dsbd {

/// Memory that the process allocates after this object is made, gathered into pages of 2 MiB.
///
/// An engine reads all of its weights in every call; the translations of pages of 4 KiB do not fit
/// the TLB. Where the system offers no such pages nothing happens; a refusal costs only speed.
class HugePages {
public:
    HugePages();
    /// Stops soon.
    ~HugePages();

    /// Gather what was allocated since, in a thread: it takes up to seconds.
    void gather();

private:
    using Range = std::pair<std::uintptr_t, std::uintptr_t>;
    static std::vector<Range> private_ranges();

    std::set<Range> before_;
    std::atomic<bool> is_over_ = false;
    std::thread thread_;
};

}  // namespace dsbd
