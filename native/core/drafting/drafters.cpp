// Drafters: where the distributions of drafted layers come from.
#include "drafting/drafters.hpp"

#include <cmath>

#include "forest_runner.hpp"
#include "logits_processing/request_processing.hpp"
#include "numbers.hpp"

namespace dsbd {
namespace {

/// See `chained_drafter`.
class ChainedDrafter final : public Drafter {
public:
    ChainedDrafter(const Forest& forest, RequestProcessing* processing, NGramDrafter* ngram,
                   ForestRunner* model, bool proposes_ends)
        : forest_(forest),
          processing_(processing),
          ngram_(ngram),
          model_(model),
          proposes_ends_(proposes_ends) {}

    bool forces() const override { return processing_ && processing_->has_constraint(); }
    std::optional<LayerNeeds> look_up(const Nodes& nodes, const TakesAll& takes_all) override {
        layer_ = Layer(nodes.size());
        LayerNeeds needs;
        std::optional<Allowed> allowed;
        if (forces()) {
            allowed = ask_constraint(nodes, takes_all, needs);
            if (!allowed) return std::nullopt;
        }
        Nodes unknown;
        for (std::size_t beam = 0; beam < nodes.size(); ++beam) {
            if (has_ended(nodes[beam])) {
                layer_.add(beam, STAY, 0.0);
            } else if (allowed && allowed->are_asked[beam]) {
                const Ints tokens = allowed->after[beam].all();
                const double log_prob = -std::log(static_cast<double>(tokens.size()));
                for (const std::int64_t token : tokens) layer_.add(beam, token, log_prob);
            } else if (ngram_) {
                ask_ngram(beam, nodes[beam]);
            }
            if (!layer_.is_known[beam]) unknown.push_back(nodes[beam]);
        }
        if (model_) needs.pending = model_->pending(unknown);
        return needs;
    }

    EngineCalls<void> compute(Nodes pending) override {
        if (model_) co_await model_->compute(std::move(pending));
    }
    JointDistribution joint(const Nodes& nodes, const Floats& log_weights,
                            const Ints& copies) override {
        JointDistribution proposed;
        proposed.nodes = nodes;
        for (std::size_t i = 0; i < layer_.parents.size(); ++i) {
            const std::size_t beam = at(layer_.parents[i]);
            proposed.log_weights.push_back(log_weights[beam] + layer_.log_probs[i]);
            if (copies.empty()) continue;
            const double log_copies = std::log(static_cast<double>(copies[beam]));
            proposed.masses.push_back(proposed.log_weights.back() + log_copies);
        }
        proposed.parents = std::move(layer_.parents);
        proposed.tokens = std::move(layer_.tokens);
        proposed.raw_log_probs = std::move(layer_.log_probs);
        Nodes rest, rest_nodes;
        Ints rest_copies;
        Floats unlisted, rest_weights;
        double largest = 0.0;  // of a search it has no bound
        for (const double log_weight : log_weights) largest = std::max(largest, log_weight);
        for (std::size_t beam = 0; beam < nodes.size(); ++beam) {
            const double times = copies.empty() ? 1.0 : static_cast<double>(copies[beam]);
            const double share = std::exp(log_weights[beam] - largest);
            unlisted.push_back(share * layer_.unlisted[beam] * times);
            if (layer_.is_known[beam]) continue;
            rest.push_back(static_cast<std::int64_t>(beam));
            rest_nodes.push_back(nodes[beam]);
            rest_weights.push_back(log_weights[beam]);
            if (!copies.empty()) rest_copies.push_back(copies[beam]);
        }
        proposed.log_unlisted = largest + std::log(pairwise_sum(unlisted));
        if (!model_ || rest.empty()) return proposed;
        return proposed.with_beams(rest, model_->joint(rest_nodes, rest_weights, rest_copies));
    }

    /// Let the n-gram drafter learn the committed tokens.
    void observe(const Iteration& iteration) override {
        if (!ngram_) return;
        for (const Beams& beams : iteration.committed) {
            Nodes live;
            for (const std::int64_t node : beams.nodes) {
                if (!forest_.is_absorbing[at(node)]) live.push_back(node);
            }
            ngram_->learn(live);
        }
    }

private:
    /// Candidates that are proposed without the model, for some of a layer's beams.
    struct Layer {
        Flags is_known;    // (num_beams,) of which beams
        Ints parents;      // (n,) the index of each candidate's beam, increasing
        Ints tokens;       // (n,) STAY for a beam that has ended
        Floats log_probs;  // (n,)
        Floats unlisted;   // (num_beams,) probability of all other tokens together

        explicit Layer(std::size_t num_beams) : is_known(num_beams), unlisted(num_beams) {}
        void add(std::size_t beam, std::int64_t token, double log_prob) {
            is_known[beam] = 1;
            parents.push_back(static_cast<std::int64_t>(beam));
            tokens.push_back(token);
            log_probs.push_back(log_prob);
        }
    };
    /// What the constraint says of a layer.
    struct Allowed {
        std::vector<AllowedAfter> after;  // (num_beams,); nothing of beams that have ended
        Flags are_asked;                  // (num_beams,) whether it drafts
    };

    /// Return what may follow, and of which beams the constraint proposes all of it; none if every
    /// path ends with its next token.
    std::optional<Allowed> ask_constraint(const Nodes& nodes, const TakesAll& takes_all,
                                          LayerNeeds& needs) const {
        Allowed found{std::vector<AllowedAfter>(nodes.size()), Flags(nodes.size())};
        std::size_t num_open = 0, num_candidates = 0;
        bool all_end = true;
        needs.is_forced = true;
        for (std::size_t beam = 0; beam < nodes.size(); ++beam) {
            if (has_ended(nodes[beam])) continue;
            AllowedAfter& allowed = found.after[beam];
            allowed = processing_->allowed_after(nodes[beam]);
            const bool ends = processing_->ends_next(nodes[beam], allowed);
            const std::size_t num_tokens = allowed.count();
            all_end = all_end && ends;
            needs.is_forced = needs.is_forced && num_tokens == 1;
            found.are_asked[beam] = num_tokens == 1 || (ends && proposes_ends_ && num_tokens > 0);
            num_candidates += num_tokens;
            ++num_open;
        }
        if (all_end) return std::nullopt;
        if (num_candidates && takes_all(num_candidates, num_open)) {
            needs.num_whole = num_candidates;
            for (std::size_t beam = 0; beam < nodes.size(); ++beam) {
                found.are_asked[beam] = found.after[beam].count() > 0;
            }
        }
        return found;
    }

    /// Propose what followed before; without a model nothing after paths that are unknown.
    void ask_ngram(std::size_t beam, std::int64_t node) {
        Proposals found = ngram_->proposals(node);
        if (processing_ && !found.tokens.empty()) {
            processing_->process(node, found.tokens, found.log_probs);
        }
        for (std::size_t i = 0; i < found.tokens.size(); ++i) {
            const double log_prob = found.log_probs[i];
            if (log_prob > LOG_ZERO) layer_.add(beam, found.tokens[i], log_prob);
        }
        if (!model_) layer_.is_known[beam] = 1;
        // Of the other beams the model lists what is possible.
        if (layer_.is_known[beam]) layer_.unlisted[beam] = found.unlisted;
    }

    bool has_ended(std::int64_t node) const {
        return forest_.has_ends && forest_.is_absorbing[at(node)];
    }

    const Forest& forest_;
    RequestProcessing* processing_;
    NGramDrafter* ngram_;
    ForestRunner* model_;
    bool proposes_ends_;
    Layer layer_{0};
};

}  // namespace

std::unique_ptr<Drafter> chained_drafter(const Forest& forest, RequestProcessing* processing,
                                         NGramDrafter* ngram, ForestRunner* model,
                                         bool proposes_ends) {
    return std::make_unique<ChainedDrafter>(forest, processing, ngram, model, proposes_ends);
}

}  // namespace dsbd
