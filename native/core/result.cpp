// The results of a request: its iterations' outputs and its sequences.
#include "result.hpp"

namespace dsbd {

std::string_view name_of(FinishReason reason) {
    switch (reason) {
        case FinishReason::eos: return "eos";
        case FinishReason::stop: return "stop";
        case FinishReason::length: break;
    }
    return "length";
}

Floats IterationOutput::agreed_logprobs(std::size_t start) const {
    const std::size_t end = agreed_tokens().size();
    Floats found;
    for (std::size_t i = start; i < end; ++i) {
        found.push_back(hypotheses.token_logprobs[at(agreement.entries[i])]);
    }
    return found;
}

std::vector<TokenLogprobs> IterationOutput::agreed_top_logprobs(std::size_t start) const {
    agreed_tokens();
    if (!tops || start >= agreement.entries.size()) return {};
    return tops->of(std::span<const std::int64_t>(agreement.entries).subspan(start));
}

std::vector<DecodedSequence> decoded_sequences(
    const Finished& finished, const Hypotheses& hypotheses,
    const std::function<FinishReason(const Ints&)>& finish_reason, const TopTokens* tops) {
    std::vector<DecodedSequence> sequences;
    for (std::size_t i = 0; i < finished.hypotheses.size(); ++i) {
        const std::int64_t entry = finished.hypotheses[i];
        const Ints path = hypotheses.path(entry);
        DecodedSequence& sequence = sequences.emplace_back();
        for (auto each : path) {
            sequence.token_ids.push_back(hypotheses.tokens[at(each)]);
            sequence.token_logprobs.push_back(hypotheses.token_logprobs[at(each)]);
        }
        sequence.logprob = hypotheses.logprobs[at(entry)];
        sequence.score = finished.scores[i];
        sequence.finish_reason = finish_reason(sequence.token_ids);
        if (tops) sequence.top_logprobs = tops->of(path);
    }
    return sequences;
}

}  // namespace dsbd
