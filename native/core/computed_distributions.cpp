// The distributions after the nodes that one engine has computed.
#include "computed_distributions.hpp"

#include <algorithm>
#include <cmath>

#include "best_by_noise.hpp"
#include "beyond_top_k.hpp"
#include "forest.hpp"
#include "logits.hpp"
#include "logits_processing/request_processing.hpp"
#include "numbers.hpp"
#include "top_tokens.hpp"

namespace dsbd {
namespace {

constexpr std::int64_t NO_CALL = -1;

bool contains(std::span<const std::int64_t> numbers, std::int64_t number) {
    return std::find(numbers.begin(), numbers.end(), number) != numbers.end();
}

}  // namespace

LeftOutTokens::LeftOutTokens(const EngineSpec& spec)
    : can_read_(!spec.num_top_logits || spec.keeps_full_logits), vocab_size_(spec.vocab_size) {}

void LeftOutTokens::forget() {
    first_slot_ = NO_CALL;
    for (auto* each : {&gone, &read_slots_, &slots_, &tokens_}) each->clear();
    raw_log_probs_.clear();
}

void LeftOutTokens::set_latest(std::int64_t first_slot, const Logits& logits) {
    first_slot_ = first_slot;
    logits_ = logits;
}

LeftOut LeftOutTokens::read(TokenDistributions& known, std::span<const std::int64_t> slots,
                            std::span<const double> log_weights, double threshold,
                            std::size_t most) {
    if (known.kind() != TokenDistributions::Kind::top || !can_read_) return LeftOut::nothing;
    const std::size_t num_known = known.num_tokens(1);
    if (num_known >= std::min(most, vocab_size_)) return LeftOut::nothing;
    gone.clear();
    bool has_read = false;
    const Ints read_before = read_slots_;
    for (std::size_t beam = 0; beam < slots.size(); ++beam) {
        const std::int64_t slot = slots[beam];
        if (contains(read_before, slot)) continue;
        if (!(log_weights[beam] + known.least(slot) >= threshold)) continue;
        if (first_slot_ == NO_CALL || !has_full(logits_) || slot < first_slot_) {
            gone.push_back(static_cast<std::int64_t>(beam));
            continue;
        }
        read_row(slot, log_weights[beam], threshold, num_known, most);
        has_read = true;
    }
    if (!gone.empty()) return LeftOut::gone;
    return has_read ? LeftOut::read : LeftOut::nothing;
}

void LeftOutTokens::read_row(std::int64_t slot, double log_weight, double threshold,
                             std::size_t num_known, std::size_t most) {
    static thread_local Ints tokens;
    static thread_local Floats scores;
    const auto row = static_cast<std::size_t>(slot - first_slot_);
    const auto logits = full_row(logits_, row);
    const double normalizer = log_normalizer(logits_, row);
    tokens.resize(std::min(most, logits.size()));
    scores.resize(tokens.size());
    largest_logits(logits, tokens.size(), tokens.data(), scores.data());
    read_slots_.push_back(slot);
    for (std::size_t i = num_known; i < tokens.size(); ++i) {
        const double raw = scores[i] - normalizer;
        if (!(log_weight + raw >= threshold)) continue;
        slots_.push_back(slot);
        tokens_.push_back(tokens[i]);
        raw_log_probs_.push_back(raw);
    }
}

void LeftOutTokens::add_to(JointDistribution& joint, std::span<const double> log_weights,
                           std::span<const std::int64_t> slots) const {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
        const auto place = std::find(slots.begin(), slots.end(), slots_[i]);
        if (place == slots.end()) continue;
        const auto beam = place - slots.begin();
        joint.parents.push_back(beam);
        joint.tokens.push_back(tokens_[i]);
        joint.log_weights.push_back(log_weights[static_cast<std::size_t>(beam)] +
                                    raw_log_probs_[i]);
        joint.raw_log_probs.push_back(raw_log_probs_[i]);
    }
    joint.masses.clear();  // a search has no copies
    joint.sort_by_beam();
}

ComputedDistributions::ComputedDistributions(Role role, const EngineSpec& spec,
                                             const Forest& forest, const Warp& warp,
                                             RequestProcessing* processing, TopTokens* top_tokens)
    : known(warp),
      left_out(spec),
      tops(top_tokens),
      role_(role),
      spec_(spec),
      forest_(forest),
      warp_(warp),
      processing_(processing),
      looks_beyond_(dsbd::looks_beyond(warp, spec)) {}

void ComputedDistributions::append(const Logits& logits, std::span<const std::int64_t> nodes,
                                   std::int64_t first_slot) {
    check_logits(logits, spec_, nodes.size());
    check_largest(logits);
    if (processing_) {
        processing_->append(logits, nodes, role_ == Role::draft, known);
    } else if (looks_beyond_) {
        append_beyond_top_k(warp_, logits, known);
    } else {
        append_warped(logits);
    }
    if (tops) tops->append(logits);
    left_out.set_latest(first_slot, logits);
}

void ComputedDistributions::append_warped(const Logits& logits) {
    for (std::size_t row = 0; row < logits.num_rows; ++row) {
        if (!warp_.top_k && logits.values) {
            known.add_dense({logits.values + row * logits.vocab_size, logits.vocab_size});
            continue;
        }
        const double normalizer = log_normalizer(logits, row);
        const auto found = known.add_top(num_most_probable(logits, warp_.top_k), normalizer);
        most_probable(logits, row, warp_.top_k, found.tokens, found.logits);
    }
}

Ints ComputedDistributions::slots_of(std::span<const std::int64_t> nodes) const {
    Ints slots(nodes.size());
    std::ranges::transform(nodes, slots.begin(),
                           [&](std::int64_t node) { return forest_.slot(role_, node); });
    return slots;
}

void ComputedDistributions::check_continues(std::span<const std::int64_t> nodes,
                                            std::span<const std::int64_t> slots) const {
    if (!processing_ || role_ != Role::target) return;
    Ints stuck;
    std::size_t num_candidates = 0;
    for (std::size_t beam = 0; beam < nodes.size(); ++beam) {
        const std::size_t num_tokens = slots[beam] ? known.num_tokens(slots[beam]) : 1;
        num_candidates += num_tokens;
        if (!num_tokens) stuck.push_back(nodes[beam]);
    }
    processing_->check_continues(stuck, num_candidates);
}

JointDistribution ComputedDistributions::joint(std::span<const std::int64_t> nodes,
                                               std::span<const double> log_weights,
                                               std::span<const std::int64_t> copies) {
    const Ints slots = slots_of(nodes);
    check_continues(nodes, slots);
    JointDistribution joint = joint_distribution(nodes, log_weights, copies, known, slots);
    if (left_out.has_tokens()) left_out.add_to(joint, log_weights, slots);
    return joint;
}

JointDistribution ComputedDistributions::best_by_noise(std::span<const std::int64_t> nodes,
                                                       std::span<const double> log_weights,
                                                       std::span<const std::int64_t> copies,
                                                       std::size_t number, std::size_t depth) {
    const Ints slots = slots_of(nodes);
    check_continues(nodes, slots);
    BestByNoise best(number, depth);
    for (std::size_t i = 0; i < nodes.size(); ++i) {
        const double log_copies = copies.empty() ? 0.0 : std::log(static_cast<double>(copies[i]));
        const auto node = static_cast<std::size_t>(nodes[i]);
        const NoisyBeam beam{static_cast<std::int64_t>(i), forest_.path_keys[node], log_weights[i],
                             log_copies};
        if (slots[i]) {
            known.consider(slots[i], beam, best);
        } else {
            best.consider(beam, STAYS);
        }
    }
    JointDistribution joint;
    joint.nodes.assign(nodes.begin(), nodes.end());
    for (const auto& each : best.found()) {
        const auto beam = static_cast<std::size_t>(each.beam);
        joint.parents.push_back(each.beam);
        joint.tokens.push_back(each.token);
        joint.log_weights.push_back(each.log_prob + log_weights[beam]);
        joint.path_keys.push_back(each.path_key);
        const bool stays = slots[beam] == 0;
        joint.raw_log_probs.push_back(stays ? 0.0 : known.raw_log_prob(slots[beam], each.place));
        if (copies.empty()) continue;
        joint.masses.push_back(joint.log_weights.back() +
                               std::log(static_cast<double>(copies[beam])));
    }
    return joint;
}

Floats ComputedDistributions::log_probs(std::span<const std::int64_t> nodes,
                                        std::span<const std::int64_t> tokens) {
    Floats found(nodes.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
        const std::int64_t slot = forest_.slot(role_, nodes[i]);
        found[i] = known.log_prob_of(slot, tokens[i]);
    }
    return found;
}

void ComputedDistributions::keep(std::span<const std::int64_t> slots) {
    bytes_peak = std::max(bytes_peak, known.num_bytes());
    left_out.forget();
    if (slots.empty()) return;
    known.keep(slots);
    if (tops) tops->keep(slots);
}

void ComputedDistributions::forget() {
    keep({});
    known.clear();
}

}  // namespace dsbd
