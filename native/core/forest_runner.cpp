// One engine's rows of the forest: the nodes that it has computed, and the calls that do.
#include "forest_runner.hpp"

#include "logits.hpp"
#include "node_features.hpp"
#include "top_tokens.hpp"

namespace dsbd {
namespace {

/// From this many iterations without a draft, recomputing the draft's rows is cheaper than keeping
/// them up to date.
constexpr std::size_t LONG_REST = 8;

}  // namespace

ForestRunner::ForestRunner(Role role, CacheView& view, Forest& forest_,
                           ComputedDistributions& distributions_, PromptScorer* scorer,
                           NodeFeatures* features)
    : forest(forest_),
      distributions(distributions_),
      role_(role),
      view_(view),
      scorer_(scorer),
      features_(features) {}

EngineCalls<void> ForestRunner::prefill(Ints token_ids, std::vector<ForestRunner*> followers) {
    const std::size_t most = scorer_ ? SCORED_CHUNK : PREFILL_CHUNK;
    for (std::size_t start = view_.prefix.tokens.size(); start < token_ids.size(); start += most) {
        const std::size_t end = std::min(start + most, token_ids.size());
        const auto chunk = IntSpan(token_ids).subspan(start, end - start);
        EngineCall call{role_,
                        &view_.meter,
                        chunk.size(),
                        [=, this](std::size_t first_row, Forward& forward) {
                            write_prompt(chunk, start, first_row, forward);
                        },
                        view_.prefix.source,
                        true};
        const ForwardResult& result = co_await needed(call);
        ++num_calls_;
        try {
            check_logits(result.logits, view_.spec(), scorer_ ? chunk.size() : 0);
        } catch (const ModelError& error) {
            throw named(error);
        }
        if (scorer_) scorer_->append(result.logits);
        if (features_) features_->take_prompt(result, start, chunk.size());
        const auto last = token_ids.begin() + static_cast<std::ptrdiff_t>(end);
        const Ints read(token_ids.begin(), last);
        view_.prefix.tokens = read;
        for (ForestRunner* follower : followers) co_await follower->prefill(read);
    }
    view_.begin();
    for (ForestRunner* follower : followers) co_await follower->prefill(token_ids);
}

void ForestRunner::write_prompt(IntSpan chunk, std::size_t start, std::size_t first_row,
                                Forward& forward) {
    forward.token_ids.assign(chunk.begin(), chunk.end());
    count_up(forward.positions, chunk.size(), static_cast<std::int64_t>(start));
    view_.append_prompt(chunk.size(), first_row, forward.mask);
    count_up(forward.logit_rows, scorer_ ? chunk.size() : 0);
    if (features_) features_->write_prompt(start, chunk.size(), forward);
}

bool ForestRunner::are_computed(IntSpan nodes) const {
    return std::all_of(nodes.begin(), nodes.end(),
                       [&](auto node) { return slots()[at(node)] >= 0; });
}

Nodes ForestRunner::missing() const {
    Nodes found;
    for (std::size_t node = 0; node < forest.size(); ++node) {
        if (slots()[node] < 0) found.push_back(static_cast<std::int64_t>(node));
    }
    return found;
}

EngineCalls<void> ForestRunner::compute(Nodes pending) {
    while (!pending.empty()) {
        const auto first_slot = static_cast<std::int64_t>(view_.num_slots());
        const Computing computing =
            begin_computing(features_ ? features_->ready(pending) : pending);
        EngineCall call{role_, &view_.meter, computing.nodes.size(),
                        [this, &computing](std::size_t first_row, Forward& forward) {
                            write(computing, first_row, forward);
                        },
                        view_.prefix.source};
        const ForwardResult& result = co_await needed(call);
        ++num_calls_;
        if (features_) features_->take(result, computing.nodes.size());
        try {
            distributions.append(result.logits, computing.nodes, first_slot);
        } catch (const ModelError& error) {
            throw named(error);
        }
        std::erase_if(pending, [&](auto node) { return slots()[at(node)] >= 0; });
    }
}

/// Give nodes their slots.
ForestRunner::Computing ForestRunner::begin_computing(Nodes nodes) {
    Computing found{std::move(nodes), {}, {}};
    if (features_) found.parent_features = features_->begin(found.nodes);
    auto next = static_cast<std::int64_t>(view_.num_slots());
    for (auto node : found.nodes) slots()[at(node)] = next++;
    for (auto node : found.nodes) {
        const std::int64_t parent = forest.parents[at(node)];
        const auto place = parent < 0 ? slots_above_.find(node) : slots_above_.end();
        found.parent_slots.push_back(place == slots_above_.end() ? forest.slot(role_, parent)
                                                                 : place->second);
    }
    return found;
}

void ForestRunner::write(const Computing& computing, std::size_t first_row, Forward& forward) {
    const std::size_t size = computing.nodes.size();
    const auto offset = static_cast<std::int64_t>(offset_);
    forward.token_ids.resize(size);
    forward.positions.resize(size);
    for (std::size_t i = 0; i < size; ++i) {
        forward.token_ids[i] = forest.tokens[at(computing.nodes[i])];
        forward.positions[i] = forest.positions[at(computing.nodes[i])] - offset;
    }
    view_.append(computing.parent_slots, first_row, forward.mask);
    count_up(forward.logit_rows, size);
    if (!features_) return;
    forward.parent_features = computing.parent_features;
    if (view_.spec().returns_features) forward.feature_rows = forward.logit_rows;
}

LeftOut ForestRunner::read_left_out(const Beams& beams, double threshold, std::size_t most) {
    LeftOutTokens& left_out = distributions.left_out;
    const LeftOut found = left_out.read(distributions.known, entries_at(slots(), beams.nodes),
                                        beams.log_weights, threshold, most);
    if (found != LeftOut::gone) return found;
    Ints gone;
    for (auto beam : left_out.gone) {
        const std::int64_t node = beams.nodes[at(beam)];
        gone.push_back(slots()[at(node)]);
        slots_above_[node] = gone.back();
        slots()[at(node)] = NOT_COMPUTED;
    }
    view_.forget_own_rows(gone);
    return found;
}

void ForestRunner::keep_needed(Flags& is_kept) const {
    Nodes left;  // the slots after pruning
    for (auto slot : features_ ? slots() : Nodes{}) left.push_back(slot_after_pruning(slot));
    for (auto node : forest.pending(places_of(is_kept), features_ ? left : slots())) {
        is_kept[at(node)] = 1;
        const std::int64_t parent = forest.parents[at(node)];
        if (parent >= 0) is_kept[at(parent)] = 1;
    }
}

void ForestRunner::prune() {
    Ints kept;
    for (auto& slot : slots()) {
        slot = slot_after_pruning(slot);
        if (slot > 0) kept.push_back(slot);
    }
    slots_above_.clear();
    distributions.keep(kept);
    if (kept.empty()) return;  // all beams have ended: `finish` looks at the rows as they were
    view_.keep(kept);
    if (features_) features_->keep(kept);
    std::int64_t next = 1;
    for (auto& slot : slots()) {
        if (slot > 0) slot = next++;
    }
}

/// Return a slot, or NOT_COMPUTED if its row has to be computed again.
std::int64_t ForestRunner::slot_after_pruning(std::int64_t slot) const {
    return features_ && features_->is_outdated(slot) ? NOT_COMPUTED : slot;
}

/// Return an error that says whose call it was.
ModelError ForestRunner::named(const ModelError& error) const {
    const char* name = role_ == Role::target ? "target" : "draft";
    return ModelError("call " + std::to_string(num_calls_) + " of the " + name + ": " +
                      error.what());
}

LateRunner::LateRunner(CacheView& view, Forest& forest_, ComputedDistributions& distributions_,
                       const Ints& prompt_ids, const Hypotheses& hypotheses, DraftContext context_)
    : ForestRunner(Role::draft, view, forest_, distributions_),
      context(std::move(context_)),
      prompt_ids_(prompt_ids),
      hypotheses_(hypotheses) {
    prefill_later(Beams::initial());
}

/// Compute the tokens of the only beam, except the last, just before its node.
void LateRunner::prefill_later(const Beams& beams) {
    const std::size_t node = at(beams.nodes[0]);
    is_unread_ = true;
    read_to_ = beams;
    const std::int64_t parent = forest.parents[node];
    if (parent >= 0) slots()[at(parent)] = 0;  // what it sees is that prompt
    Ints path = tokens();
    path.pop_back();
    num_unread_ = context.choose(path.size(), [&](std::size_t start) {
        return longest_prefix({context.tokens(path, start), view_.prefix.source}).tokens.size();
    });
}

/// Return the rows that the path has: its own, unless another request has more.
PrefixCache LateRunner::longest_prefix(const RowIdentity& identity) const {
    PrefixCache shared = view_.row_cache.longest_prefix(identity);
    const std::size_t num_own = view_.prefix.num_common(identity);
    if (shared.tokens.size() > num_own) return shared;
    PrefixCache own = view_.prefix;
    own.shorten(num_own);
    return own;
}

void LateRunner::rest(std::size_t num_iterations, const Beams& beams) {
    if (!num_iterations) {
        if (is_put_off_) prefill_later(beams);
    } else if (!is_put_off_ && (num_iterations >= LONG_REST || is_unread_)) {
        put_off(beams);
    }
}

/// Keep only the rows of the one path for a next call.
void LateRunner::put_off(const Beams& beams) {
    is_put_off_ = true;
    if (is_unread_) return;
    Ints computed;
    for (auto& slot : slots()) {
        if (slot <= 0) continue;
        computed.push_back(slot);
        slot = NOT_COMPUTED;
    }
    view_.keep(computed);
    is_unread_ = true;
    read_to_ = beams;
    view_.end(context.tokens(tokens()));
    slots_above_.clear();
    distributions.forget();
}

std::pair<std::size_t, std::size_t> LateRunner::unread() const {
    const bool reads_source = view_.spec().reads_source && !num_calls_ && view_.prefix.source;
    return {is_unread_ ? num_unread_ : 0,
            reads_source ? view_.prefix.source->token_ids().size() : 0};
}

/// Return the prompt and the new tokens of the only beam that are read.
Ints LateRunner::tokens() const {
    Ints found = prompt_ids_;
    const Ints more = hypotheses_.tokens_of(read_to_.hypotheses[0]);
    found.insert(found.end(), more.begin(), more.end());
    return found;
}

void LateRunner::start_here() {
    offset_ = context.offset();
    view_.prefix.start = context.start();
    view_.prefix.num_begin = context.num_begin();
}

bool LateRunner::can_draft(const Beams& beams) {
    newest_ = at(std::ranges::max(entries_at(forest.positions, beams.nodes)));
    if (context.reaches(newest_)) return true;  // usually
    first_ = newest_;
    for (auto node : pending(beams.nodes))
        first_ = std::min(first_, at(forest.positions[at(node)]));
    return context.can_reach(first_, newest_);
}

EngineCalls<void> LateRunner::compute(Nodes pending) {
    if (pending.empty()) co_return;
    if (is_unread_) co_await read_prompt();
    if (!context.reaches(newest_)) {
        const std::size_t num_dropped = context.begin_again(first_, newest_);
        start_here();
        std::optional<EngineCall> again = view_.begin_again(num_dropped, context.num_begin());
        if (again) co_await needed(*again);
    }
    co_await ForestRunner::compute(std::move(pending));
}

/// Rows that another request has by now are shared.
EngineCalls<void> LateRunner::read_prompt() {
    Ints token_ids = tokens();
    token_ids.pop_back();
    token_ids = context.tokens(token_ids);
    is_unread_ = is_put_off_ = false;
    view_.prefix = longest_prefix({token_ids, view_.prefix.source});
    start_here();
    co_await prefill(std::move(token_ids));
}

}  // namespace dsbd
