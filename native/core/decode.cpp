// The decoding loop: draft a forest, verify it in one target call, select, prune, observe.
#include "decode.hpp"

#include "drafting/acceptance.hpp"
#include "drafting/ngram.hpp"
#include "error.hpp"
#include "set_up.hpp"

namespace dsbd {
namespace {

/// The beams of every committed layer, and how many of their nodes the forest had already.
struct Selected {
    std::vector<Beams> committed;
    std::int64_t num_accepted = 0;
};

/// Compute the forest; select as many layers as the nodes allow.
///
/// Further calls are made if the first layer needs logits that a top-k head has left out: each
/// returns some of them.
EngineCalls<Selected> verify_and_select(LoopParts& run, const Beams& beams,
                                        const std::vector<DraftLayer>& drafted, std::size_t depth) {
    Selected found;
    const std::int64_t num_met = run.forest.num_met;
    for (std::size_t tries = 0; tries <= beams.nodes.size(); ++tries) {
        co_await run.target->compute(run.target->missing());
        found.committed = run.rule->select(*run.target, beams, drafted, depth);
        if (found.committed.empty()) continue;
        found.num_accepted = run.forest.num_met - num_met;
        co_return std::move(found);
    }
    throw ModelError(
        "the target said that all logits of its last rows can be read, but they cannot; export the "
        "bundle again, or with --logits full");
}

/// Return the record of an iteration: which beams go on, and which nodes pruning leaves.
///
/// The nodes that can still matter are the beams, descendants of them that the target has computed,
/// and ancestors that an engine has yet to compute.
Iteration iteration_of(LoopParts& run, Beams roots, std::vector<DraftLayer> drafted,
                       Selected selected) {
    Iteration found;
    found.roots = std::move(roots);
    found.drafted = std::move(drafted);
    found.committed = std::move(selected.committed);
    found.num_accepted_tokens = selected.num_accepted;
    found.beams = found.committed.back();
    if (run.config.memory == Memory::single) {
        // The beam of highest log-probability per token (DSBD paper, memory reduction).
        Floats scores;
        for (auto entry : found.beams.hypotheses) {
            scores.push_back(run.hypotheses.score(entry, 1.0));
        }
        const auto best = std::max_element(scores.begin(), scores.end());
        found.beams = found.beams.only(static_cast<std::size_t>(best - scores.begin()));
    }
    found.survivors.resize(run.forest.size());
    if (std::size_t num_left = run.num_descendants) {
        const Flags is_below = run.forest.below(found.beams.nodes);
        for (std::size_t node = 0; node < is_below.size() && num_left; ++node) {
            found.survivors[node] = is_below[node];
            num_left -= is_below[node];
        }
    }
    for (auto node : found.beams.nodes) found.survivors[at(node)] = 1;
    for (const ForestRunner* runner : run.runners) runner->keep_needed(found.survivors);
    found.hypotheses = run.rule->live(found.beams);
    for (const DraftLayer& layer : found.drafted) found.num_draft_tokens += layer.num_new;
    return found;
}

/// Drop all but the survivors from forest and caches; return the beams renumbered.
Beams prune(LoopParts& run, const Iteration& iteration) {
    const Nodes renumbered = run.forest.prune(iteration.survivors);
    for (ForestRunner* runner : run.runners) runner->prune();
    Beams beams = iteration.beams;
    for (auto& node : beams.nodes) node = renumbered[at(node)];
    return beams;
}

/// Return the best hypotheses as sequences.
std::vector<DecodedSequence> best_sequences(const LoopParts& run, const Beams& beams) {
    const Finished best = run.rule->results(beams).first(run.config.num_return_sequences);
    const Hypotheses& hypotheses = run.hypotheses;
    std::vector<DecodedSequence> sequences;
    for (std::size_t i = 0; i < best.hypotheses.size(); ++i) {
        const std::int64_t entry = best.hypotheses[i];
        const Ints path = hypotheses.path(entry);
        DecodedSequence& sequence = sequences.emplace_back();
        sequence.token_ids = entries_at(hypotheses.tokens, path);
        sequence.token_logprobs = entries_at(hypotheses.token_logprobs, path);
        sequence.logprob = hypotheses.logprobs[at(entry)];
        sequence.score = best.scores[i];
        sequence.finish_reason = run.request.finish_reason(sequence.token_ids);
        if (run.tops()) sequence.top_logprobs = run.tops()->of(path);
    }
    return sequences;
}

/// Leave the caches to the next request; return the best sequences and the statistics.
DecodeResult finish(LoopParts& run, const Beams& beams) {
    const DecodingRequest& request = run.request;
    const Hypotheses& hypotheses = run.hypotheses;
    Ints agreed = request.prompt_ids;
    const Ints common = entries_at(hypotheses.tokens, hypotheses.common(beams.hypotheses));
    agreed.insert(agreed.end(), common.begin(), common.end());
    DecodeResult result;
    for (ForestRunner* runner : run.runners) {
        runner->finish(agreed);
        result.distribution_bytes_peak += runner->distributions.bytes_peak;
    }
    result.sequences = best_sequences(run, beams);
    const Ints& first = result.sequences[0].token_ids;
    request.estimator->learn_length(first.size());
    if (request.ngram_pool) {
        Ints text = request.prompt_ids;
        text.insert(text.end(), first.begin(), first.end());
        request.ngram_pool->add_text(text);
    }
    result.stats = run.stats->stats(static_cast<std::int64_t>(first.size()));
    if (PromptScorer* scorer = run.target->scorer()) result.prompt_logprobs = scorer->result();
    return result;
}

}  // namespace

EngineCalls<DecodeResult> decoding_loop(DecodingRequest& request, CacheView& target,
                                        CacheView* draft) {
    LoopParts run(request, target, draft);
    Ints prompt = request.prompt_ids;
    prompt.pop_back();
    co_await run.target->prefill(std::move(prompt), run.lockstep);
    Beams beams = Beams::initial();
    std::size_t depth = 0;
    while (!run.rule->is_finished(beams, depth)) {
        std::vector<DraftLayer> drafted = co_await run.draft(beams, depth);
        Selected selected = co_await verify_and_select(run, beams, drafted, depth);
        const Iteration iteration =
            iteration_of(run, std::move(beams), std::move(drafted), std::move(selected));
        run.observe(iteration);
        beams = prune(run, iteration);
        depth += iteration.committed.size();
        if (request.on_iteration) {
            request.on_iteration(
                {run.hypotheses, iteration.hypotheses, run.agreement, *run.stats, run.tops()});
        }
    }
    co_return finish(run, beams);
}

}  // namespace dsbd
