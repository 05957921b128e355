// Concurrent requests on one pipeline, from any thread (service.py, engine_loop.py, scheduler.py).
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "batched_decoder.hpp"
#include "runtime/pipeline.hpp"

namespace dsbd {

/// Too many requests wait; a later attempt may succeed.
class QueueFullError : public Error {
public:
    using Error::Error;
};

/// A bug, or the engines have ended by one.
class InternalError : public Error {
public:
    using Error::Error;
};

/// New tokens that all submission beams agree on.
struct TokenPiece {
    Ints token_ids;
    Floats token_logprobs;
};

/// The answer to a request, with the text of each sequence where the bundle has native text.
struct GenerationResult {
    DecodeResult decoded;
    std::vector<std::string> texts;  // of the sequences; empty: no native text
    std::uint64_t seed = 0;

    /// The object that `dsbd-run --json` prints; "text" is null without native text.
    std::string json() const;
};

/// Tokens and text that became final in one iteration; false cancels the request.
using OnStep = std::function<bool(const TokenPiece& piece, const std::string& text)>;

/// Runs the requests of any number of threads; concurrent ones share the engine calls. First come,
/// first served, within a bounded cache: see scheduler.py.
class Service {
public:
    /// Error: `kv_bytes` leaves no room for the smallest caches.
    explicit Service(std::unique_ptr<Pipeline> pipeline);
    ~Service() { close(); }

    /// Refuse new requests and finish those of other threads.
    void close();

    Pipeline& pipeline() { return *pipeline_; }
    /// Answer a request; wait until it is done. on_step: called in this thread; may be null.
    /// Throws Error, QueueFullError, Cancelled, InternalError.
    GenerationResult generate(const Prompt& prompt, std::string_view options,
                              const OnStep& on_step);
    /// The current load as a JSON object; numbers may be a moment old.
    std::string stats_json() const;

private:
    struct Submission;
    using SubmissionPointer = std::shared_ptr<Submission>;

    std::size_t cache_rows() const;
    void enqueue(const SubmissionPointer& submission);
    DecodeResult wait(Submission& submission, const TextRun* start, const DecodingConfig& config,
                      const OnStep& on_step);
    void run();
    bool schedule(BatchedDecoder& decoder);
    std::vector<SubmissionPointer> admit(const BatchedDecoder& decoder);
    bool sources_fit(const Submission& next) const;
    std::size_t expected_rows(const Submission& submission);
    double& mean_rows(std::size_t num_beams);
    void join(BatchedDecoder& decoder, const SubmissionPointer& submission);
    void deliver(const Progress& progress);
    void end(Submission& submission,
             std::variant<std::monostate, DecodeResult, std::exception_ptr> outcome);
    void fail_all(const std::string& reason);

    std::unique_ptr<Pipeline> pipeline_;
    std::size_t max_rows_;

    mutable std::mutex mutex_;  // guards what follows, and the state of live requests
    std::condition_variable changed_;
    std::deque<SubmissionPointer> waiting_;    // in the order of arrival; first those preempted
    std::vector<SubmissionPointer> running_;   // in the order of arrival
    std::map<std::size_t, double> mean_rows_;  // of answers, by the least beams of a class
    std::size_t num_preemptions_ = 0, rows_in_use_ = 0, kv_bytes_ = 0;
    bool is_closing_ = false;
    std::string failure_;  // of the thread; empty: none

    std::mutex closing_mutex_;
    std::thread thread_;  // runs the engines; the last member, as it uses the others
};

}  // namespace dsbd
