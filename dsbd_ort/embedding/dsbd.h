/* dsbd.h: dynamic-width speculative beam decoding for C and C++.
 *
 *     dsbd_pipeline *pipeline = NULL;
 *     dsbd_request request = {0};
 *     char *result = NULL;
 *     request.prompt = "def read_json(";
 *     request.options = "{\"num_beams\": 4, \"max_new_tokens\": 32}";
 *     if (dsbd_open("bundle/", NULL, &pipeline) || dsbd_generate(pipeline, &request, &result))
 *         fprintf(stderr, "%s\n", dsbd_last_error());
 *     else
 *         puts(result);
 *     dsbd_free(result);
 *     dsbd_close(pipeline);
 *
 * All functions may be called by any thread at any time, those of one pipeline too: its requests
 * share the calls of its engines. All text is UTF-8 and ends with a zero byte. Arguments belong to
 * the caller and are not kept beyond the call.
 */
#ifndef DSBD_H
#define DSBD_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define DSBD_API __attribute__((visibility("default")))
#else
#define DSBD_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The status of a call. After any but DSBD_OK, dsbd_last_error() returns the message. */
typedef enum dsbd_status {
    DSBD_OK = 0,
    DSBD_ERROR = 1,      /* the caller can fix it: an argument, an option, a bundle, the memory */
    DSBD_QUEUE_FULL = 2, /* too many requests wait already; try again later */
    DSBD_CANCELLED = 3,  /* by on_step */
    DSBD_INTERNAL = 4    /* a bug, or an incomplete Python environment */
} dsbd_status;

/* An opened bundle. Nothing can be read through the pointer. One that is closed, or was never
 * opened, is refused with DSBD_ERROR. */
typedef struct dsbd_pipeline dsbd_pipeline;

/* The tokens and text that became final in one iteration; all may be empty. Valid during on_step
 * only. */
typedef struct dsbd_step {
    const int64_t *token_ids;     /* new tokens of the best sequence: never taken back */
    const double *token_logprobs; /* the target's log-probability of each */
    size_t num_tokens;
    const char *text; /* lags behind the tokens while a character or a stop string is undecided */
    size_t num_text_bytes; /* without the zero byte at the end */
} dsbd_step;

/* Called in the thread that called dsbd_generate. Any value but 0 cancels the request. It may
 * start other requests; it must return: no exception, no longjmp. */
typedef int (*dsbd_on_step)(const dsbd_step *step, void *context);

/* One request. Set all to zero first, then exactly one of prompt, prompt_ids and messages. */
typedef struct dsbd_request {
    const char *prompt;        /* text to continue */
    const int64_t *prompt_ids; /* token ids to continue */
    size_t num_prompt_ids;
    const char *messages;  /* a chat: [{"role": "user", "content": "Hello"}] */
    const char *options;   /* fields of DecodingConfig: {"num_beams": 4}; NULL: the defaults */
    dsbd_on_step on_step;  /* NULL: no streaming */
    void *on_step_context; /* given to on_step */
} dsbd_request;

/* Open the bundle in folder bundle, write it to *pipeline (NULL on failure).
 * settings: NULL, or an object with any of
 *     "provider" ("cpu", "cuda", ...), "draft_provider", "num_threads", "cuda_graphs", "verify",
 *     "prefix_cache": as of dsbd_ort.Pipeline.from_bundle;
 *     "max_requests", "max_queued", "kv_bytes": requests that run together, that may wait beyond
 *     those, and the bytes that the caches of all together may take. */
DSBD_API dsbd_status dsbd_open(const char *bundle, const char *settings, dsbd_pipeline **pipeline);

/* Answer a request; wait until it is done. Write to *result the object that `dsbd-run --json`
 * prints, to be freed with dsbd_free (NULL on failure). result may be NULL. */
DSBD_API dsbd_status dsbd_generate(dsbd_pipeline *pipeline, const dsbd_request *request,
                                   char **result);

/* Write to *stats an object with num_running, num_waiting, rows_in_use, max_rows and kv_bytes, to
 * be freed with dsbd_free (NULL on failure). */
DSBD_API dsbd_status dsbd_stats(const dsbd_pipeline *pipeline, char **stats);

/* Refuse new requests, finish those of other threads, then release the engines. NULL is allowed.
 * To be called for every pipeline before main returns. */
DSBD_API dsbd_status dsbd_close(dsbd_pipeline *pipeline);

/* Free the text of dsbd_generate or dsbd_stats. NULL is allowed. */
DSBD_API void dsbd_free(char *text);

/* The message of the last call of this thread that failed, in one line; "" if none has. Valid
 * until the next call of this thread. */
DSBD_API const char *dsbd_last_error(void);

/* The version of this library, such as "0.2.0". */
DSBD_API const char *dsbd_version(void);

#ifdef __cplusplus
}
#endif

#endif
