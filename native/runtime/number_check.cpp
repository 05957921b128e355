// The calls of the check, and the comparison with the processor (number_check.py).
#include "runtime/number_check.hpp"

#include <algorithm>
#include <cmath>

namespace dsbd {

namespace {

constexpr std::size_t NUM_PROMPT = 9, NUM_NODES = 35;
constexpr int NUM_LAST = 4;  // calls of one size: two are queued, then recorded ones are replayed

using Numbers = std::vector<float>;
using Paths = std::vector<Ints>;  // the rows that each row sees

/// Append rows with these paths; add the logits of some of them.
void add_logits(OrtEngine& engine, const Paths& paths, const Ints& logit_rows, Numbers& numbers) {
    const std::size_t num_new = paths.size(), num_rows = engine.num_rows();
    const EngineSpec& spec = engine.spec();
    Forward forward;
    forward.mask.reset(num_new, num_rows + num_new);
    for (std::size_t s = 0; s < num_new; ++s) {
        for (const std::int64_t row : paths[s]) forward.mask.set(s, static_cast<std::size_t>(row));
        forward.token_ids.push_back(
            static_cast<std::int64_t>((s * 7919 + num_rows) % spec.vocab_size));
        forward.positions.push_back(
            static_cast<std::int64_t>(std::min(paths[s].size(), spec.context_length) - 1));
    }
    forward.logit_rows = logit_rows;
    if (spec.reads_features) {
        forward.parent_features.sources.assign(num_new, ParentFeatures::ZEROS);
        forward.parent_features.rows.assign(num_new, 0);
    }
    const Logits logits = engine.forward(forward).logits;
    if (logits.values) {
        numbers.insert(numbers.end(), logits.values,
                       logits.values + logits.num_rows * logits.vocab_size);
        return;
    }
    numbers.insert(numbers.end(), logits.top_logits,
                   logits.top_logits + logits.num_rows * logits.num_top);
    numbers.insert(numbers.end(), logits.logsumexp, logits.logsumexp + logits.num_rows);
}

/// The logits of a prompt's last row, of a forest (a binary tree), and of rows after a prune.
Numbers numbers_of(OrtEngine& engine) {
    Paths paths;
    for (std::size_t row = 0; row < NUM_PROMPT + NUM_NODES; ++row) {
        const std::size_t node = row - NUM_PROMPT;
        const std::size_t parent = row <= NUM_PROMPT ? row - 1 : NUM_PROMPT + (node - 1) / 2;
        paths.push_back(row == 0 ? Ints() : paths[parent]);
        paths.back().push_back(static_cast<std::int64_t>(row));
    }
    Ints nodes(NUM_NODES);
    for (std::size_t i = 0; i < NUM_NODES; ++i) nodes[i] = static_cast<std::int64_t>(i);
    const auto first_node = paths.begin() + NUM_PROMPT;
    Numbers numbers;
    add_logits(engine, {paths.begin(), first_node}, {NUM_PROMPT - 1}, numbers);
    add_logits(engine, {first_node, paths.end()}, nodes, numbers);
    engine.keep(paths.back());
    for (int i = 0; i < NUM_LAST; ++i) {
        Ints all(engine.num_rows() + 1);
        for (std::size_t row = 0; row < all.size(); ++row)
            all[row] = static_cast<std::int64_t>(row);
        add_logits(engine, {all}, {0}, numbers);
    }
    engine.keep({});
    return numbers;
}

/// Error unless an open engine on a device computes the processor's numbers; it is empty
/// afterwards.
void check_numbers(OrtEngine& engine, const Ort::Env& env, const Bundle& bundle,
                   const std::string& role) {
    const std::string name = engine.device()->name();
    Numbers computed;
    try {
        computed = numbers_of(engine);
    } catch (const Error& error) {
        throw Error(name + " cannot run " + bundle.model_path(role.c_str()).string() + ": " +
                    error.what() + "; use provider 'cpu', or export with another --dtype");
    }
    EngineSettings on_cpu;
    on_cpu.packs = false;  // the weights stay in the file: the check needs no second copy of them
    OrtEngine reference(env, bundle, role, on_cpu);
    const Numbers expected = numbers_of(reference);
    float largest = 1.0F, difference = 0.0F;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        if (std::isfinite(expected[i])) largest = std::max(largest, std::abs(expected[i]));
        if (computed[i] == expected[i]) continue;  // -inf of tokens that a draft never proposes
        const float each = std::abs(computed[i] - expected[i]);
        difference = std::isnan(each) ? INFINITY : std::max(difference, each);
    }
    const float most = bundle.entry(role).dtype == "fp32" ? 1e-3F : 5e-2F;
    if (difference <= most * largest) return;
    throw Error(name + " computes wrong logits: they differ by " + std::to_string(difference) +
                " from the CPU's, whose largest is " + std::to_string(largest) +
                "; update the GPU's driver, or use provider 'cpu'");
}

}  // namespace

std::unique_ptr<OrtEngine> checked_engine(const Ort::Env& env, const Bundle& bundle,
                                          const std::string& role, const EngineSettings& settings,
                                          const OrtEngine* target) {
    auto engine = std::make_unique<OrtEngine>(env, bundle, role, settings, target);
    if (engine->device()) check_numbers(*engine, env, bundle, role);
    return engine;
}

}  // namespace dsbd
