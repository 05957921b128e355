// The thread that runs the engines: admits requests, iterates, delivers events.
#include "runtime/service.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "row_bounds.hpp"

namespace dsbd {

namespace {

constexpr std::size_t DEFAULT_ROWS = 2048;  // of a request
constexpr std::size_t FEW_BEAMS = 8;
constexpr double FIRST_ANSWER_ROWS = 256.0;  // for up to FEW_BEAMS beams, else in proportion
constexpr double LEAST_ANSWER_ROWS = 64.0;   // about the rows of an iteration
constexpr double WEIGHT = 1.0 / 8;           // of the last answer in the mean

using Outcome = std::variant<std::monostate, DecodeResult, std::exception_ptr>;

}  // namespace

/// A request from its submission to its end.
struct Service::Submission {
    explicit Submission(DecodingRequest given)
        : request(std::move(given)),
          num_prompt_tokens(request.prompt_ids.size()),
          num_beams(request.config.num_beams),
          source(request.source) {}

    /// Cache rows that it has, or had when it was preempted; before it begins, the prompt's.
    std::size_t num_rows() const { return live ? live->num_rows() : num_prompt_tokens; }

    DecodingRequest request;  // moves to `live`
    std::size_t num_prompt_tokens, num_beams;
    SourcePointer source;
    std::size_t most_rows = 0;      // that it may need
    std::size_t rows_reserved = 0;  // that it was expected to need when it was admitted
    std::shared_ptr<LiveRequest> live;
    bool is_cancelled = false;
    std::deque<TokenPiece> pieces;
    Outcome outcome;
    std::condition_variable changed;  // pieces or outcome
};

Service::Service(std::unique_ptr<Pipeline> pipeline)
    : pipeline_(std::move(pipeline)),
      max_rows_(cache_rows()),
      kv_bytes_(pipeline_->kv_bytes()),
      thread_([this] { run(); }) {}

void Service::close() {
    {
        const std::lock_guard lock(mutex_);
        is_closing_ = true;
        changed_.notify_all();
    }
    const std::lock_guard lock(closing_mutex_);  // of several threads that close it one joins
    if (thread_.joinable()) thread_.join();
}

/// Rows that each engine's cache may hold: the largest step within `kv_bytes`.
std::size_t Service::cache_rows() const {
    const PipelineSettings& settings = pipeline_->settings();
    const Bundle& bundle = pipeline_->bundle();
    if (!settings.kv_bytes) {
        return bucket_capacity(
            std::max(settings.max_requests * DEFAULT_ROWS, 2 * bundle.context_length()));
    }
    const std::size_t row_bytes =
        bundle.target.row_bytes() + (bundle.draft ? bundle.draft->row_bytes() : 0);
    const std::size_t bytes_of_paths =
        settings.max_requests *
        (path_bytes(bundle.target) + (bundle.draft ? path_bytes(*bundle.draft) : 0));
    const std::size_t affordable =
        (*settings.kv_bytes - std::min(bytes_of_paths, *settings.kv_bytes)) /
        std::max<std::size_t>(row_bytes, 1);
    std::size_t rows = 0;
    for (std::size_t next = bucket_capacity(1); next <= affordable;) {
        rows = next;
        next = bucket_capacity(rows + 1);
    }
    if (!rows) {
        throw Error("kv_bytes is " + std::to_string(*settings.kv_bytes) +
                    ", but the smallest caches of this bundle take " +
                    std::to_string(bucket_capacity(1) * row_bytes + bytes_of_paths) +
                    " bytes; raise "
                    "it");
    }
    return rows;
}

GenerationResult Service::generate(const Prompt& prompt, std::string_view options,
                                   const OnStep& on_step) {
    PreparedRequest prepared = pipeline_->prepare(prompt, options);
    const DecodingConfig config = prepared.request.config;
    const auto submission = std::make_shared<Submission>(std::move(prepared.request));
    submission->most_rows = most_rows(submission->num_prompt_tokens, config,
                                      pipeline_->target().spec().num_top_logits > 0);
    if (on_step) {  // in the thread of the engines; every iteration, as each may be cancelled
        submission->request.on_iteration =
            [this, submission = submission.get(),
             num_given = std::size_t{0}](const IterationOutput& output) mutable {
                const Ints& tokens = output.agreed_tokens();
                TokenPiece piece;
                piece.token_ids.assign(tokens.begin() + static_cast<std::ptrdiff_t>(num_given),
                                       tokens.end());
                if (!piece.token_ids.empty())
                    piece.token_logprobs = output.agreed_logprobs(num_given);
                num_given = tokens.size();
                const std::lock_guard lock(mutex_);
                submission->pieces.push_back(std::move(piece));
                submission->changed.notify_one();
            };
    }
    enqueue(submission);
    GenerationResult result;
    result.decoded = wait(*submission, prepared.start.get(), config, on_step);
    if (prepared.start) {
        for (const DecodedSequence& sequence : result.decoded.sequences) {
            result.texts.push_back(text_until_stop(*prepared.start, sequence.token_ids, config));
        }
    }
    result.seed = static_cast<std::uint64_t>(*config.seed);
    return result;
}

void Service::enqueue(const SubmissionPointer& submission) {
    const std::lock_guard lock(mutex_);
    const PipelineSettings& limits = pipeline_->settings();
    if (!failure_.empty()) throw InternalError(failure_);
    if (is_closing_) throw Error("the pipeline is closed or closing; open another one");
    if (submission->most_rows > max_rows_) {
        throw CapacityError(
            "the prompt is too long for its options, or exceeds the available "
            "context size: the request may need " +
            std::to_string(submission->most_rows) + " cache rows (" +
            std::to_string(submission->num_prompt_tokens) +
            " of them for the prompt), the service has " + std::to_string(max_rows_) +
            "; use fewer beams or new tokens, a "
            "shorter draft or prompt");
    }
    if (running_.size() + waiting_.size() >= limits.max_requests + limits.max_queued) {
        throw QueueFullError("the queue is full: " + std::to_string(running_.size()) +
                             " requests are running and " + std::to_string(waiting_.size()) +
                             " are waiting, the limits are " + std::to_string(limits.max_requests) +
                             " and " + std::to_string(limits.max_queued) + "; try again later");
    }
    waiting_.push_back(submission);
    changed_.notify_one();
}

/// Hand the pieces of a request to its caller until it has ended.
DecodeResult Service::wait(Submission& submission, const TextRun* start,
                           const DecodingConfig& config, const OnStep& on_step) {
    std::optional<TextStream> stream;
    if (on_step && start) stream.emplace(*start, config);
    std::size_t num_given = 0;
    std::unique_lock lock(mutex_);
    while (true) {
        submission.changed.wait(
            lock, [&] { return !submission.pieces.empty() || submission.outcome.index(); });
        if (submission.pieces.empty()) break;
        const TokenPiece piece = std::move(submission.pieces.front());
        submission.pieces.pop_front();
        if (submission.is_cancelled) continue;
        lock.unlock();
        num_given += piece.token_ids.size();
        const bool goes_on = on_step(piece, stream ? stream->push(piece.token_ids) : "");
        lock.lock();
        if (!goes_on) {
            submission.is_cancelled = true;
            changed_.notify_one();
        }
    }
    lock.unlock();
    if (submission.is_cancelled) throw Cancelled();
    if (auto* error = std::get_if<std::exception_ptr>(&submission.outcome))
        std::rethrow_exception(*error);
    DecodeResult result = std::get<DecodeResult>(std::move(submission.outcome));
    if (on_step) {
        const DecodedSequence& best = result.sequences.front();
        const auto from = static_cast<std::ptrdiff_t>(num_given);
        const TokenPiece rest{{best.token_ids.begin() + from, best.token_ids.end()},
                              {best.token_logprobs.begin() + from, best.token_logprobs.end()}};
        std::string text;
        if (stream) {
            text = stream->push(rest.token_ids);
            text += stream->finish();
        }
        if (!on_step(rest, text)) throw Cancelled();
    }
    return result;
}

void Service::run() {
    try {
        BatchedDecoderOptions options;
        options.max_rows = max_rows_;
        options.shares_prefixes = pipeline_->settings().prefix_cache;
        options.costs = pipeline_->costs();
        BatchedDecoder decoder(pipeline_->target(), pipeline_->draft(), options);
        while (schedule(decoder)) {
            for (const Progress& progress : decoder.iterate()) deliver(progress);
        }
    } catch (const std::exception& error) {
        fail_all(error.what());
    } catch (...) {
        fail_all("an unknown error");
    }
}

/// End cancelled requests and admit waiting ones, until at least one runs. False: the service is
/// closing and no request is left.
bool Service::schedule(BatchedDecoder& decoder) {
    while (true) {
        std::vector<SubmissionPointer> cancelled, admitted;
        {
            std::unique_lock lock(mutex_);
            rows_in_use_ = pipeline_->target().num_rows();
            kv_bytes_ = pipeline_->kv_bytes();
            const auto is_cancelled = [](const SubmissionPointer& submission) {
                return submission->is_cancelled;
            };
            std::ranges::copy_if(running_, std::back_inserter(cancelled), is_cancelled);
            std::ranges::copy_if(waiting_, std::back_inserter(cancelled), is_cancelled);
            if (cancelled.empty()) admitted = admit(decoder);
            if (running_.empty() && waiting_.empty() && is_closing_) return false;
            if (cancelled.empty() && running_.empty()) changed_.wait(lock);
        }
        for (const SubmissionPointer& submission : cancelled) {
            if (submission->live) decoder.leave(*submission->live);
            end(*submission, std::make_exception_ptr(Cancelled()));
        }
        for (const SubmissionPointer& submission : admitted) join(decoder, submission);
        const std::lock_guard lock(mutex_);
        if (!running_.empty() && cancelled.empty()) return true;
    }
}

/// Move as many of the first requests of the queue as fit to the running ones. If none runs, the
/// first one always fits; none overtakes it, so that a request with many rows does not starve.
std::vector<Service::SubmissionPointer> Service::admit(const BatchedDecoder& decoder) {
    std::vector<SubmissionPointer> admitted;
    if (waiting_.empty()) return admitted;
    std::size_t num_taken = decoder.num_used_rows();
    for (const SubmissionPointer& submission : running_) {
        num_taken +=
            std::max(submission->rows_reserved, submission->num_rows()) - submission->num_rows();
    }
    while (!waiting_.empty() && running_.size() < pipeline_->settings().max_requests) {
        const SubmissionPointer submission = waiting_.front();
        const std::size_t num_expected = expected_rows(*submission);
        if (!running_.empty() && num_taken + num_expected > max_rows_) break;
        if (!running_.empty() && !sources_fit(*submission)) break;
        num_taken += num_expected;
        submission->rows_reserved = num_expected;
        waiting_.pop_front();
        running_.push_back(submission);
        admitted.push_back(submission);
    }
    return admitted;
}

/// Whether the engines keep the sources of the running requests and the next one at a time: beyond
/// that, sources would be read again in every iteration.
bool Service::sources_fit(const Submission& next) const {
    std::vector<SourcePointer> sources;
    const auto add = [&](const SourcePointer& source) {
        const bool is_known = std::find(sources.begin(), sources.end(), source) != sources.end();
        if (source && !is_known) sources.push_back(source);
    };
    for (const SubmissionPointer& submission : running_) add(submission->source);
    add(next.source);
    const OrtEngine* const draft = pipeline_->draft();
    return sources.size() < 2 || (sources.size() <= pipeline_->target().most_sources(sources) &&
                                  (!draft || sources.size() <= draft->most_sources(sources)));
}

/// The rows so far and those of a mean answer: so a preempted request is admitted only with room
/// to go on.
std::size_t Service::expected_rows(const Submission& submission) {
    const auto of_answer = static_cast<std::size_t>(mean_rows(submission.num_beams));
    return std::min(submission.num_rows() + of_answer, submission.most_rows);
}

/// Mean rows of answers with about so many beams, without prompts; later ones weigh more.
double& Service::mean_rows(std::size_t num_beams) {
    std::size_t least = FEW_BEAMS;
    while (2 * least <= num_beams) least *= 2;
    const double first = FIRST_ANSWER_ROWS * static_cast<double>(least) / FEW_BEAMS;
    return mean_rows_.try_emplace(least, first).first->second;
}

void Service::join(BatchedDecoder& decoder, const SubmissionPointer& submission) {
    try {
        if (submission->live) {
            decoder.resume(submission->live);
        } else {
            submission->live = decoder.join(std::move(submission->request));
        }
    } catch (...) {
        end(*submission, std::current_exception());
    }
}

void Service::deliver(const Progress& progress) {
    SubmissionPointer submission;
    {
        const std::lock_guard lock(mutex_);
        const auto found = std::find_if(running_.begin(), running_.end(), [&](const auto& each) {
            return each->live == progress.live;
        });
        if (found == running_.end()) return;
        submission = *found;
        if (std::holds_alternative<WasPreempted>(progress.event)) {
            running_.erase(found);
            waiting_.push_front(submission);
            ++num_preemptions_;
            return;
        }
    }
    if (const auto* error = std::get_if<std::exception_ptr>(&progress.event)) {
        end(*submission, *error);
        return;
    }
    DecodeResult result = std::get<DecodeResult>(progress.event);
    result.stats.kv_bytes_peak =
        static_cast<std::int64_t>(pipeline_->kv_bytes_peak() + result.distribution_bytes_peak);
    const bool was_cut = result.sequences.front().finish_reason == FinishReason::length;
    const auto num_rows = static_cast<double>(progress.live->num_rows_at_end()) -
                          static_cast<double>(submission->num_prompt_tokens);
    {
        const std::lock_guard lock(mutex_);
        double& mean = mean_rows(submission->num_beams);
        if (!was_cut || num_rows > mean) {
            mean = std::max(mean + WEIGHT * (num_rows - mean), LEAST_ANSWER_ROWS);
        }
    }
    end(*submission, std::move(result));
}

void Service::end(Submission& submission, Outcome outcome) {
    const std::lock_guard lock(mutex_);
    const auto is_it = [&](const SubmissionPointer& each) { return each.get() == &submission; };
    std::erase_if(running_, is_it);
    std::erase_if(waiting_, is_it);
    submission.live = nullptr;
    submission.outcome = std::move(outcome);
    submission.changed.notify_one();
}

void Service::fail_all(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    failure_ = "the thread that runs the engines has ended: " + reason +
               "; close the pipeline and open it again";
    const auto fail = [&](const SubmissionPointer& submission) {
        submission->live = nullptr;
        submission->outcome = std::make_exception_ptr(InternalError(failure_));
        submission->changed.notify_one();
    };
    std::for_each(running_.begin(), running_.end(), fail);
    std::for_each(waiting_.begin(), waiting_.end(), fail);
    running_.clear();
    waiting_.clear();
}

std::string Service::stats_json() const {
    const std::lock_guard lock(mutex_);
    std::size_t rows_reserved = 0;
    for (const SubmissionPointer& submission : running_) rows_reserved += submission->rows_reserved;
    return Json{{"num_running", running_.size()},
                {"num_waiting", waiting_.size()},
                {"rows_in_use", rows_in_use_},
                {"rows_reserved", rows_reserved},
                {"max_rows", max_rows_},
                {"kv_bytes", kv_bytes_},
                {"num_preemptions", num_preemptions_},
                {"not_built", Json::parse(pipeline_->defaults().not_built())}}
        .dump();
}

}  // namespace dsbd
