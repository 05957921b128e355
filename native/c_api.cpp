// The functions of dsbd_native.h: check pointers, find the pipeline, turn exceptions into statuses.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "dsbd_native.h"
#include "runtime/service.hpp"
#include "text/unicode.hpp"

namespace {

using ServicePointer = std::shared_ptr<dsbd::Service>;

thread_local std::string last_error;

/// Keep a message as one line of UTF-8.
dsbd_status failed(dsbd_status status, std::string_view message) {
    last_error = dsbd::text_of_bytes(message);
    for (char& c : last_error) c = c == '\n' || c == '\r' ? ' ' : c;
    return status;
}

/// Run a call; return a status for every exception, whose message the caller can read.
template <class Call>
dsbd_status guarded(Call call) noexcept {
    try {
        call();
        return DSBD_OK;
    } catch (const dsbd::QueueFullError& error) {
        return failed(DSBD_QUEUE_FULL, error.what());
    } catch (const dsbd::InternalError& error) {
        return failed(DSBD_INTERNAL, error.what());
    } catch (const dsbd::Error& error) {
        return failed(DSBD_ERROR, error.what());
    } catch (const dsbd::Cancelled&) {
        return failed(DSBD_CANCELLED, "cancelled by on_step");
    } catch (const std::bad_alloc&) {
        return failed(DSBD_ERROR,
                      "no memory for this request; use fewer beams, a shorter draft or "
                      "fewer new tokens");
    } catch (const std::exception& error) {
        return failed(DSBD_INTERNAL, std::string("internal error: ") + error.what());
    } catch (...) {
        return failed(DSBD_INTERNAL, "internal error of an unknown kind");
    }
}

/// Open pipelines by the number that C holds of each: from 1, never reused.
class OpenPipelines {
public:
    dsbd_pipeline* add(ServicePointer service) {
        const std::lock_guard lock(mutex_);
        by_number_[++last_] = std::move(service);
        return reinterpret_cast<dsbd_pipeline*>(last_);
    }
    ServicePointer find(const dsbd_pipeline* pipeline) {
        const std::lock_guard lock(mutex_);
        const auto found = by_number_.find(reinterpret_cast<std::uintptr_t>(pipeline));
        if (found == by_number_.end()) {
            throw dsbd::Error(
                "this pipeline is not open; pass one that dsbd_open returned and "
                "that is not closed yet");
        }
        return found->second;
    }
    /// Remove it, and finish the requests of other threads.
    void close(const dsbd_pipeline* pipeline) {
        ServicePointer service = find(pipeline);
        {
            const std::lock_guard lock(mutex_);
            by_number_.erase(reinterpret_cast<std::uintptr_t>(pipeline));
        }
        service->close();
    }

private:
    std::mutex mutex_;
    std::map<std::uintptr_t, ServicePointer> by_number_;
    std::uintptr_t last_ = 0;
};

/// Pipelines that are still open at the end of the process are left to it.
OpenPipelines& open_pipelines() {
    static auto* const pipelines = new OpenPipelines;
    return *pipelines;
}

char* copied(const std::string& text) {
    char* const copy = static_cast<char*>(std::malloc(text.size() + 1));
    if (!copy) throw std::bad_alloc();
    std::memcpy(copy, text.c_str(), text.size() + 1);
    return copy;
}

/// Return a text of the caller; Error: it is no UTF-8.
std::string_view checked(const char* name, const char* given) {
    const std::string_view text(given);
    for (std::size_t at = 0; at < text.size();) {
        const dsbd::Scan scan = dsbd::scanned(text, at);
        if (!scan.is_character) {
            char byte[5];
            std::snprintf(byte, sizeof byte, "0x%02x", static_cast<unsigned char>(text[at]));
            throw dsbd::Error(std::string(name) + " is invalid UTF-8: byte " + byte + " at " +
                              std::to_string(at));
        }
        at += scan.length;
    }
    return text;
}

dsbd::Prompt prompt_of(const dsbd_request& request) {
    if (request.prompt) return checked("prompt", request.prompt);
    if (request.messages) return dsbd::ChatMessages{checked("messages", request.messages)};
    return dsbd::TokenSpan(request.prompt_ids, request.num_prompt_ids);
}

dsbd::OnStep on_step_of(const dsbd_request& request) {
    if (!request.on_step) return nullptr;
    return [&request](const dsbd::TokenPiece& piece, const std::string& text) {
        const dsbd_step step{piece.token_ids.data(), piece.token_logprobs.data(),
                             piece.token_ids.size(), text.c_str(), text.size()};
        return request.on_step(&step, request.on_step_context) == 0;
    };
}

/// Call a function of the program again until its room suffices.
template <class Result, class Function>
Result called(const char* name, std::size_t room, Function function) {
    Result found(room, {});
    while (true) {
        const std::int64_t size = function(found.data(), found.size());
        if (size < 0) throw dsbd::Error(std::string(name) + " has refused the request");
        const bool fits = static_cast<std::size_t>(size) <= found.size();
        found.resize(static_cast<std::size_t>(size));
        if (fits) return found;
    }
}

dsbd::TextCallbacks callbacks_of(const dsbd_text& text) {
    return {[text](std::string_view given) {
                return called<dsbd::Ints>("encode", given.size() + 8, [&](auto* ids, auto room) {
                    return text.encode(given.data(), given.size(), ids, room, text.context);
                });
            },
            [text](dsbd::TokenSpan ids) {
                return called<std::string>("decode", 8 * ids.size() + 8, [&](auto* to, auto room) {
                    return text.decode(ids.data(), ids.size(), to, room, text.context);
                });
            }};
}

}  // namespace

dsbd_status dsbd_open(const char* bundle, const char* settings, dsbd_pipeline** pipeline) {
    if (!pipeline) {
        return failed(DSBD_ERROR, "pipeline is NULL; expected a place for the opened pipeline");
    }
    *pipeline = nullptr;
    if (!bundle) return failed(DSBD_ERROR, "bundle is NULL; expected the folder of a bundle");
    return guarded([&] {
        const auto given =
            dsbd::PipelineSettings::of(checked("settings", settings ? settings : "{}"));
        auto opened = std::make_unique<dsbd::Pipeline>(checked("bundle", bundle), given);
        *pipeline = open_pipelines().add(std::make_shared<dsbd::Service>(std::move(opened)));
    });
}

dsbd_status dsbd_generate(dsbd_pipeline* pipeline, const dsbd_request* request, char** result) {
    if (result) *result = nullptr;
    if (!request) return failed(DSBD_ERROR, "request is NULL; expected a request");
    if ((request->prompt != nullptr) + (request->prompt_ids != nullptr) +
            (request->messages != nullptr) !=
        1) {
        return failed(DSBD_ERROR, "a request needs exactly one of prompt, prompt_ids and messages");
    }
    return guarded([&] {
        const ServicePointer service = open_pipelines().find(pipeline);
        const char* const options = request->options ? request->options : "{}";
        const dsbd::GenerationResult found = service->generate(
            prompt_of(*request), checked("options", options), on_step_of(*request));
        if (result) *result = copied(found.json());
    });
}

dsbd_status dsbd_stats(const dsbd_pipeline* pipeline, char** stats) {
    if (!stats) return failed(DSBD_ERROR, "stats is NULL; expected a place for the text");
    *stats = nullptr;
    return guarded([&] { *stats = copied(open_pipelines().find(pipeline)->stats_json()); });
}

dsbd_status dsbd_close(dsbd_pipeline* pipeline) {
    if (!pipeline) return DSBD_OK;
    return guarded([&] { open_pipelines().close(pipeline); });
}

void dsbd_free(char* text) { std::free(text); }

const char* dsbd_last_error(void) { return last_error.c_str(); }

const char* dsbd_version(void) { return DSBD_VERSION; }

dsbd_status dsbd_set_text(dsbd_pipeline* pipeline, const dsbd_text* text) {
    if (!text || !text->encode || !text->decode) {
        return failed(DSBD_ERROR, "text is NULL or lacks a function; expected encode and decode");
    }
    return guarded(
        [&] { open_pipelines().find(pipeline)->pipeline().set_text(callbacks_of(*text)); });
}
