// Draft policy "throughput": as much as pays, by costs and acceptance.
#include "drafting/throughput.hpp"

#include <array>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "drafting/draft_context.hpp"
#include "numbers.hpp"

namespace dsbd {
namespace {

constexpr double INFINITE = std::numeric_limits<double>::infinity();
// All in iterations.
constexpr std::int64_t FIRST_WITHOUT = 3;  // before a setting's first draft: the cost without one
constexpr double LEAST_TRY = 0.16;  // that a try is charged at least when the next one is planned
constexpr double LONGEST_REST = 16, LONGEST_HOPELESS_REST = 64;
constexpr double LONGEST_FREE_REST = 7;  // if drafts cost no call: copies appear without notice
constexpr std::size_t FEW_TOKENS = 32;  // tokens, of which an iteration is much
constexpr double FIRST_TOKEN = 0.05;  // of the time until it: most that a draft may add
constexpr double PROMPT_MARGIN = 2.0;  // expected savings over the price of the prompt
constexpr std::size_t FIRST_ANSWER = 256;  // most tokens that are expected of a first answer
constexpr double CHEAP = 0.5;  // if layers cost less, a try that agrees is not charged

/// Return a number of a candidate, the same in every joint distribution.
std::int64_t candidate_id(std::int64_t node, std::int64_t token) {
    return (node << 32) + token + 1;
}

/// Return the ids of nodes as candidates; those among `parents` have ended.
Ints candidate_ids(const Forest& forest, const Nodes& parents, const Nodes& nodes) {
    Flags stays(forest.size());
    if (forest.has_ends) {
        for (const std::int64_t parent : parents) stays[at(parent)] = 1;
    }
    Ints ids;
    for (const std::int64_t node : nodes) {
        const std::size_t i = at(node);
        ids.push_back(stays[i] ? candidate_id(node, STAY)
                               : candidate_id(forest.parents[i], forest.tokens[i]));
    }
    return ids;
}

/// Return log(sum(exp(x))), added one by one as numpy.logaddexp does.
double log_sum(FloatSpan numbers) {
    double sum = numbers.front();
    for (const double each : numbers.subspan(1)) {
        const double high = std::max(sum, each), low = std::min(sum, each);
        sum = high == low ? high + std::log(2.0) : high + std::log1p(std::exp(low - high));
    }
    return sum;
}

/// Drafts as many candidates as are expected to pay.
class ThroughputDraftPolicy final : public DraftPolicy {
public:
    ThroughputDraftPolicy(RequestCosts& costs, AcceptanceEstimator& estimator, Scores scores,
                          const Forest& forest, ThroughputSettings settings)
        : costs_(costs),
          estimator_(estimator),
          scores_(std::move(scores)),
          forest_(forest),
          settings_(std::move(settings)),
          budget_(&estimator.budget(costs_.num_sharers)) {}

    std::size_t rest() override {
        const std::size_t num_to_rest = num_to_rest_;
        num_to_rest_ -= num_to_rest ? 1 : 0;
        return num_to_rest;
    }
    void begin(std::size_t num_pending, std::size_t most_layers) override {
        began_ = settings_.host_seconds();
        refresh();
        estimator_.refresh();
        budget_ = &estimator_.budget(costs_.num_sharers);
        const auto [num_unread, num_unread_source] = settings_.unread();
        const double prompt = costs_.reading(num_unread, num_unread_source);
        if (!num_iterations_) {
            if (estimator_.calls == 0.0) estimator_.learn_rate(1.0, usual_ / costs_.row);
            const double read =
                settings_.target_seconds() / static_cast<double>(costs_.num_sharers);
            budget_->begin_request(read / usual_, prompt / usual_);
        }
        const bool is_first = costs_.are_learned && !estimator_.num_learned;
        may_call_ = !is_first || estimator_.loop.num_plain >= FIRST_WITHOUT;
        if (!num_iterations_ && most_layers >= FEW_TOKENS) {
            // The first token does not wait for the draft's prompt; an iteration is lost.
            const double most = FIRST_TOKEN * settings_.target_seconds();
            may_call_ = may_call_ && prompt <= std::max(most, usual_call_);
        }
        if (may_call_ && !has_advance_) ask_for_advance(most_layers + 1);
        token_seconds_ = costs_.row * estimator_.calls / estimator_.tokens;
        for (std::size_t i = 1; i <= LOOK_AHEAD; ++i) {
            powers_[i] = powers_[i - 1] + std::pow(estimator_.acceptance, static_cast<double>(i));
        }
        has_begun_ = true;
        begin_draft(num_pending, most_layers, prompt, num_unread_source);
    }

    bool takes_all(std::size_t num_candidates, std::size_t num_rows) override {
        const double more = seconds_of_rows(num_candidates) - seconds_of_rows(costs_.num_beams);
        return num_candidates <= costs_.most_beams && more < costs_.draft(num_rows);
    }
    bool wants_layer(std::size_t num_rows, std::size_t num_whole = 0) override {
        Cost& cost = now_.cost;
        const double call = costs_.draft(num_rows) + layer_;
        double prompt = num_rows ? cost.prompt : 0.0;
        // No evidence yet: the rest is for the first drafts.
        if (!estimator_.num_learned) prompt = std::min(prompt, 0.5 * cost.stake);
        if (!may_draft(num_rows) || !can_pay(num_rows, call, prompt)) return false;
        const bool is_call_known = num_rows || num_whole || !costs_.has_draft_model;
        if (!is_call_known) return true;
        cost.next_call = {std::min(num_rows, costs_.most_rows), prompt};
        return gains(num_rows, num_whole, call) || may_lose();
    }

    Ints choose(JointDistribution& joint, std::size_t depth) override {
        Draft& draft = now_;
        Cost& cost = draft.cost;
        cost.calls.push_back(cost.next_call);
        if (cost.next_call.first) cost.prompt = 0.0;
        Deficits found = least_deficits(joint, scores_(joint, depth));
        Ints& best = found.best;
        if (best.empty()) {  // every candidate ends its sequence: there is nothing to verify
            draft.reach = 0.0;
            return best;
        }
        const std::size_t narrowest = std::min(costs_.num_beams, best.size());
        const std::size_t widest = std::max(narrowest, std::min(costs_.most_beams, best.size()));
        Layer& layer = draft.layers.emplace_back();
        layer.nodes = joint.nodes;
        for (const std::int64_t each : best) {
            layer.best.push_back(
                candidate_id(joint.nodes[at(joint.parents[at(each)])], joint.tokens[at(each)]));
        }
        layer.gaps = gaps_of(joint, found, narrowest, widest);
        layer.narrowest = narrowest;
        const Floats accepted = estimator_.accepted(layer.gaps, draft.layers.size() - 1);
        const Width chosen = best_width(accepted, narrowest);
        const double reach = draft.reach * accepted[chosen.index];
        const std::size_t width = narrowest + chosen.index;
        estimator_.choose(reach / draft.reach, width);
        if (chosen.gain <= 0.0) {
            draft.reach = 0.0;
            return {};
        }
        draft.is_try = false;  // it is expected to pay
        draft.reach = reach;
        draft.worth = chosen.worth + usual_call_;
        draft.expected += reach;
        cost.num_rows = std::min(cost.num_rows + width, costs_.most_rows);
        best.resize(width);
        found.values.resize(width);
        draft.parent_deficits = found.values.back() > 0.0 ? std::move(found.values) : Floats();
        return best;
    }

    Ints choose_forced(const JointDistribution& joint) override {
        Draft& draft = now_;
        const auto num_stays = std::count(joint.tokens.begin(), joint.tokens.end(), STAY);
        const std::size_t num_new = joint.num_candidates() - at(num_stays);
        const double saved = draft.reach * costs_.target(num_new);
        const bool is_limit =
            draft.layers.size() >= draft.limit || draft.num_forced == MOST_FORCED_LAYERS;
        if (is_limit || saved <= seconds_of_rows(num_new)) return {};
        ++draft.num_forced;
        draft.expected += draft.reach;
        draft.layers.emplace_back().is_forced = true;
        Cost& cost = draft.cost;
        cost.num_needed = std::min(cost.num_needed + num_new, costs_.most_rows);
        cost.num_rows = std::min(cost.num_rows + num_new, costs_.most_rows);
        draft.worth = worth_of_more(draft.reach, cost.num_rows) + usual_call_;
        if (!draft.parent_deficits.empty()) {
            draft.parent_deficits = entries_at(draft.parent_deficits, joint.parents);
        }
        return all_candidates(joint);
    }

    void observe(const Iteration& iteration) override {
        const Draft& draft = now_;
        DraftBudget& budget = *budget_;
        const auto num_saved = static_cast<double>(iteration.committed.size() - 1);
        budget.pass_iteration();
        if (!std::exchange(has_begun_, false)) {
            budget.add(num_saved);  // by nodes of an earlier draft
            return;
        }
        ++num_iterations_;
        estimator_.loop.learn(draft.layers.size(), settings_.host_seconds() - began_);
        refresh();  // calls cost what they are known to cost now that they have been made
        const double spent_seconds = spent();
        const bool agrees = learn(iteration.committed);
        if (draft.layers.size() > draft.num_forced) {
            const double layer = usual_call_ + seconds_of_rows(costs_.num_beams);
            if (!(draft.is_try && agrees && layer < CHEAP * usual_)) {
                budget.settle(spent_seconds / usual_, num_saved, draft.is_try);
            }
        } else {
            budget.add(num_saved);
            if (settings_.may_rest) plan_rest();
        }
        if (num_iterations_ > 1 || costs_.num_beams == 1) {  // the first has one row
            double prompt = 0.0;
            for (const auto& [num_rows, seconds] : draft.cost.calls) prompt += seconds;
            double seconds = costs_.target(draft.cost.num_needed) + estimator_.loop.iteration;
            seconds += spent_seconds;
            seconds += 2.0 * prompt / static_cast<double>(draft.cost.num_left) - prompt;
            estimator_.learn_rate(draft.expected, seconds / costs_.row);
        }
    }

private:
    /// A drafted layer, for learning from it.
    struct Layer {
        Nodes nodes;  // the beams and draft beams it continues
        Ints best;  // ids of its candidates
        Floats gaps;  // (num_widths,) by width from `narrowest` on
        std::size_t narrowest = 0;
        bool is_forced = false;
    };
    /// Cost of a draft: what its layers may cost, and their rows and calls; times in seconds.
    struct Cost {
        double stake = 0.0;  // most that its layers may cost, each at its narrowest
        double prompt = 0.0;  // to read the prompt and source, 0 once they are read
        std::size_t num_left = 1;  // iterations that may share the cost of the prompt
        std::size_t num_rows = 0;  // of the target call, with the layers that were chosen
        std::size_t num_needed = 0;  // without them
        std::pair<std::size_t, double> next_call{0, 0.0};  // rows, seconds to read the prompt
        std::vector<std::pair<std::size_t, double>> calls;
        double refused = 0.0;  // cost of a first layer that exceeds the budget
    };
    /// The draft of the current iteration: its limits, its layers and their expected result.
    struct Draft {
        Cost cost;
        std::size_t limit = 0;  // most layers
        bool may_call = false;  // whether the draft model may be called for them
        bool may_try = false;  // the budget may buy a first layer that is not expected to pay
        bool is_try = false;  // it does
        std::vector<Layer> layers;
        std::size_t num_forced = 0;
        Floats parent_deficits;  // (num_beams,) of the last layer; empty: all are 0
        double reach = 1.0;  // probability that all layers are accepted
        double expected = 1.0;  // tokens
        double worth = 0.0;  // seconds that further layers gain, their calls included
    };
    /// A width, counted from the narrowest, its gain and that of the layers after it.
    struct Width {
        std::size_t index = 0;
        double gain = LOG_ZERO, worth = 0.0;  // no gain: none is possible
    };
    /// Candidates of least deficit, in order, (num_best,).
    struct Deficits {
        Ints best;
        Floats values;
    };

    void refresh() {
        const LoopCost& loop = estimator_.loop;
        costs_.refresh();
        layer_ = loop.layer;
        usual_call_ = costs_.draft(costs_.num_beams) + loop.layer;
        usual_ = costs_.target(costs_.num_beams) + loop.iteration;
    }
    void begin_draft(std::size_t num_pending, std::size_t most_layers, double prompt,
                     std::size_t num_unread_source) {
        const DraftBudget& budget = *budget_;
        now_ = Draft();
        now_.limit = std::min(settings_.most_layers, most_layers);
        Cost& cost = now_.cost;
        // The less there is, the smaller the drafts: else one or two that fail would be all.
        cost.stake = std::max(0.5 * balance(), balance() - 0.6 * usual_);
        cost.prompt = prompt;
        cost.num_left = most_layers + 1;
        if (num_unread_source) {  // few targets are longer than their source
            cost.num_left = std::min(cost.num_left, std::max<std::size_t>(num_unread_source, 2));
        }
        cost.num_rows = cost.num_needed = std::min(num_pending, costs_.most_rows);
        try_cost_ = std::max((usual_call_ + prompt) / usual_, LEAST_TRY);
        now_.may_try = budget.iterations_until(try_cost_, true) == 0.0;
        const bool pays = budget.believes_estimates() && pays_for(prompt, most_layers + 1);
        now_.may_call = may_call_ && (pays || now_.may_try);
        now_.worth = worth_of_more(1.0, cost.num_rows) + usual_call_;
    }
    double balance() const { return budget_->balance * usual_; }  // seconds

    /// Return whether one more layer is possible, and allowed if the draft model is called.
    bool may_draft(std::size_t num_rows) const {
        const bool is_first = now_.cost.calls.empty();
        const bool may_call = now_.may_call && (is_first || budget_->believes_estimates());
        const bool has_room = now_.layers.size() < now_.limit && now_.reach > 0.0;
        return has_room && (may_call || !num_rows);
    }

    /// Return whether the stake, or the whole balance for a first layer, pays for a layer.
    bool can_pay(std::size_t num_rows, double call, double prompt) {
        Cost& cost = now_.cost;
        const bool is_first = now_.layers.empty();
        double needed = spent() + call + prompt;
        if (num_rows && !now_.may_try) needed += seconds_of_rows(costs_.num_beams);
        if (needed > (is_first ? std::max(cost.stake, balance()) : cost.stake)) {
            cost.refused = is_first ? needed : 0.0;
            return false;
        }
        cost.stake = std::max(cost.stake, needed);
        return true;
    }

    /// Return whether a layer and those after it are expected to gain more than they cost.
    bool gains(std::size_t num_rows, std::size_t num_whole, double call) {
        Cost& cost = now_.cost;
        double worth = now_.worth - call;
        if (num_whole) {  // the selected beams are among them: an iteration is saved
            cost.stake = balance();
            const double saved =
                costs_.target(std::min(num_whole, costs_.num_beams)) + estimator_.loop.iteration;
            worth += std::max(now_.reach * saved - seconds_of_rows(num_whole) - call, 0.0);
        }
        // Every iteration left pays alike for the prompt: one for two tokens, if drafting pays.
        return worth > (num_rows ? 2.0 * cost.prompt / static_cast<double>(cost.num_left) : 0.0);
    }

    /// Return whether a first layer is drafted without expected gain, and note if as a try.
    bool may_lose() {
        const bool has_earned = budget_->has_earned();
        const bool is_possible = now_.cost.calls.empty() && (now_.may_try || has_earned);
        now_.is_try = is_possible && !has_earned;
        return is_possible;
    }

    std::size_t expected_tokens(std::size_t most_tokens) const {
        const auto usual = static_cast<std::size_t>(std::nearbyint(estimator_.answer_length));
        return std::min(most_tokens, usual ? usual : FIRST_ANSWER);
    }

    /// Return whether drafts are expected to save twice what reading the prompt costs.
    ///
    /// By the agreement that was measured with the pair, as long as nothing else is known.
    bool pays_for(double prompt, std::size_t most_tokens) const {
        const AcceptanceEstimator& estimator = estimator_;
        if (prompt == 0.0 || estimator.num_learned || !estimator.is_measured) return true;
        const double speed =
            expected_speed(costs_, estimator, estimator.agreement(settings_.context_size()));
        const double saved =
            static_cast<double>(expected_tokens(most_tokens)) * usual_ * (1.0 - 1.0 / speed);
        return saved >= PROMPT_MARGIN * prompt;
    }

    /// Take an advance for the request if drafts are expected to pay.
    void ask_for_advance(std::size_t most_tokens) {
        has_advance_ = true;
        if (!costs_.has_draft_model || expected_speed(costs_, estimator_) <= 1.0) return;
        const double read = settings_.target_seconds() / static_cast<double>(costs_.num_sharers);
        budget_->advance(static_cast<double>(expected_tokens(most_tokens)) + read / usual_);
    }

    /// Rest until the budget pays for a draft, or for part of the wait for a try.
    void plan_rest() {
        const DraftBudget& budget = *budget_;
        double rest = 0.0;
        if (now_.cost.refused != 0.0) {
            rest = budget.iterations_until(now_.cost.refused / usual_);
        } else {
            const double wait = budget.iterations_until(try_cost_, true);
            rest = std::trunc(wait * (1.0 - budget.share / DraftBudget::SHARE));
        }
        // While tries have paid, calls may turn out cheaper, by what others learn.
        const double longest = !costs_.has_draft_model              ? LONGEST_FREE_REST
                               : budget.share == DraftBudget::SHARE ? LONGEST_REST
                                                                    : LONGEST_HOPELESS_REST;
        num_to_rest_ = static_cast<std::size_t>(std::min(rest, longest));
    }

    /// Count which widths sufficed, layer by layer; return if the first's narrowest did.
    bool learn(const std::vector<Beams>& committed) {
        bool agrees = false;
        for (std::size_t depth = 0; depth < std::min(now_.layers.size(), committed.size());
             ++depth) {
            const Layer& layer = now_.layers[depth];
            if (layer.is_forced) continue;
            const Nodes& nodes = committed[depth].nodes;
            if (nodes.empty()) break;  // all that was selected has ended: no width was tested
            std::unordered_map<std::int64_t, std::size_t> rank_by_id;
            for (std::size_t i = 0; i < layer.best.size(); ++i) rank_by_id[layer.best[i]] = i;
            std::size_t num_needed = 0;
            for (const std::int64_t id : candidate_ids(forest_, layer.nodes, nodes)) {
                const auto rank = rank_by_id.find(id);
                const std::size_t found =
                    rank == rank_by_id.end() ? layer.best.size() : rank->second;
                num_needed = std::max(num_needed, found + 1);
            }
            const std::size_t num_more = std::max(num_needed, layer.narrowest) - layer.narrowest;
            const std::size_t num_short = std::min(num_more, layer.gaps.size());
            estimator_.learn(layer.gaps, num_short, depth);
            if (depth) continue;
            agrees = num_short == 0;
            estimator_.learn_agreement(settings_.context_size(), agrees);
        }
        return agrees;
    }

    /// Return the seconds that the draft costs so far, its forced layers aside.
    double spent() const {
        const Cost& cost = now_.cost;
        double seconds = costs_.target(cost.num_rows) - costs_.target(cost.num_needed);
        for (const auto& [num_rows, prompt] : cost.calls) {
            seconds += costs_.draft(num_rows) + layer_ + prompt;
        }
        return seconds;
    }
    double seconds_of_rows(std::size_t num_new) const {
        const std::size_t before = now_.cost.num_rows;
        return costs_.target(before + num_new) - costs_.target(before);
    }
    /// Return the width of largest gain; accepted: of each, from `narrowest` on. Not by the stake:
    /// narrow layers, accepted less often, would keep a small budget small.
    Width best_width(const Floats& accepted, std::size_t narrowest) const {
        const double before = costs_.target(now_.cost.num_rows);
        Width best;
        for (std::size_t i = 0; i < accepted.size(); ++i) {
            const std::size_t num_rows = now_.cost.num_rows + narrowest + i;
            if (num_rows > costs_.most_known) break;
            const double reach = now_.reach * accepted[i], worth = worth_of_more(reach, num_rows);
            const double gain = reach * token_seconds_ - (costs_.target(num_rows) - before) + worth;
            if (gain > best.gain) best = {i, gain, worth};
        }
        return best;
    }

    Deficits least_deficits(const JointDistribution& joint, Floats scores) const {
        const std::size_t num_beams = costs_.num_beams, num_wanted = costs_.most_beams + 1;
        const Floats& parents = now_.parent_deficits;
        Deficits found;
        if (parents.empty()) {
            found.best = best_candidates(scores, num_wanted);
            const auto score_of = [&](std::size_t i) { return scores[at(found.best[i])]; };
            // Fewer can be selected than beams: a draft that is always right selects them all.
            const double threshold =
                found.best.size() >= num_beams ? score_of(num_beams - 1) : -INFINITE;
            for (std::size_t i = 0; i < found.best.size(); ++i) {
                found.values.push_back(std::max(threshold - score_of(i), 0.0));
            }
            return found;
        }
        Floats certain;
        for (std::size_t i = 0; i < scores.size(); ++i) {
            if (parents[at(joint.parents[i])] == 0.0) certain.push_back(scores[i]);
        }
        double threshold = -INFINITE;
        if (certain.size() >= num_beams) {
            const auto last = certain.begin() + static_cast<std::ptrdiff_t>(num_beams - 1);
            std::nth_element(certain.begin(), last, certain.end(), std::greater<>());
            threshold = *last;
        }
        for (std::size_t i = 0; i < scores.size(); ++i) {  // become deficits, negated
            const double inherited = parents[at(joint.parents[i])];
            double deficit = scores[i] > -INFINITE ? inherited : INFINITE;
            if (threshold > -INFINITE) deficit = inherited + std::max(threshold - scores[i], 0.0);
            scores[i] = -deficit;
        }
        found.best = best_candidates(scores, num_wanted);
        for (const std::int64_t each : found.best) found.values.push_back(-scores[at(each)]);
        return found;
    }

    Floats gaps_of(const JointDistribution& joint, const Deficits& found, std::size_t narrowest,
                   std::size_t widest) const {
        Floats gaps(widest - narrowest + 1, INFINITE);  // of the widest if none is left out of it
        const std::size_t num_known = std::min(widest + 1, found.values.size());
        for (std::size_t i = narrowest; i < num_known; ++i) gaps[i - narrowest] = found.values[i];
        if (joint.log_unlisted > LOG_ZERO) {  // tokens that the draft does not list
            const double gap = std::max(log_sum(joint.log_masses()) - joint.log_unlisted, 0.0);
            for (double& each : gaps) each = std::min(each, gap);
        }
        return gaps;
    }

    /// Return the gain of layers after one reached with this probability, `num_rows` being before
    /// them.
    ///
    /// They have the usual width and acceptance. As many as pay together: if the engine computes
    /// rows in blocks, one layer can be expensive and the next one free.
    double worth_of_more(double reach, std::size_t num_rows) const {
        if (now_.layers.size() >= now_.limit) return 0.0;
        const std::size_t most_ahead = std::min(now_.limit - now_.layers.size(), LOOK_AHEAD);
        const auto usual_width = static_cast<std::size_t>(std::nearbyint(estimator_.rows));
        const std::size_t width = std::max(usual_width, costs_.num_beams);
        double best = -INFINITE;  // of no layer: 0
        for (std::size_t ahead = 0; ahead <= most_ahead; ++ahead) {
            double gain = reach * (token_seconds_ * powers_[ahead]);
            gain -= costs_.target(num_rows + width * ahead) - costs_.target(num_rows);
            gain -= usual_call_ * static_cast<double>(ahead);
            best = std::max(best, gain);
        }
        return best;
    }

    RequestCosts& costs_;
    AcceptanceEstimator& estimator_;
    Scores scores_;
    const Forest& forest_;
    ThroughputSettings settings_;
    DraftBudget* budget_;  // of the load when the iteration began
    std::size_t num_to_rest_ = 0, num_iterations_ = 0;
    bool has_begun_ = false;  // an iteration: not while the policy rests
    bool has_advance_ = false;  // whether an advance was asked for
    bool may_call_ = false;  // whether the draft model may be called
    double began_ = 0.0;
    Draft now_;
    double layer_ = 0.0, usual_call_ = 0.0, usual_ = 0.0;  // seconds, as known now
    double try_cost_ = 0.0, token_seconds_ = 0.0;
    std::array<double, LOOK_AHEAD + 1> powers_{};  // sums of the powers of the usual acceptance
};

}  // namespace

std::unique_ptr<DraftPolicy> throughput_policy(RequestCosts& costs, AcceptanceEstimator& estimator,
                                               Scores scores, const Forest& forest,
                                               ThroughputSettings settings) {
    return std::make_unique<ThroughputDraftPolicy>(costs, estimator, std::move(scores), forest,
                                                   std::move(settings));
}

}  // namespace dsbd
