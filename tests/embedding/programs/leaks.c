/* leaks BUNDLE NUM_ROUNDS: under memcheck, print the bytes definitely lost and still reachable
   after NUM_ROUNDS rounds of requests, and after four times as many. */
#include <stdio.h>
#include <stdlib.h>

#include <valgrind/memcheck.h>

#include "dsbd.h"

static int go_on(const dsbd_step *step, void *context)
{
    *(size_t *)context += step->num_text_bytes;
    return 0;
}

static int cancel(const dsbd_step *step, void *context)
{
    *(size_t *)context += step->num_text_bytes;
    return 1;
}

/* One that succeeds, one that streams, one that is cancelled, one that is refused, statistics. */
static void ask_all(dsbd_pipeline *pipeline)
{
    size_t num_bytes = 0;
    char *result = NULL;
    dsbd_request request = {0};
    request.prompt = "ab";
    request.options = "{\"max_new_tokens\": 3, \"num_beams\": 2, \"draft_length\": 2}";
    request.on_step_context = &num_bytes;
    dsbd_generate(pipeline, &request, &result);
    dsbd_free(result);
    request.on_step = go_on;
    dsbd_generate(pipeline, &request, NULL);
    request.on_step = cancel;
    dsbd_generate(pipeline, &request, &result);
    request.options = "{\"num_beams\": 0}";
    dsbd_generate(pipeline, &request, &result);
    dsbd_stats(pipeline, &result);
    dsbd_free(result);
}

static void print_lost(int num_rounds)
{
    unsigned long lost = 0, dubious = 0, reachable = 0, suppressed = 0;
    VALGRIND_DO_QUICK_LEAK_CHECK;
    VALGRIND_COUNT_LEAKS(lost, dubious, reachable, suppressed);
    printf("%d %lu %lu\n", num_rounds, lost + suppressed, dubious + reachable);
}

int main(int argc, char **argv)
{
    dsbd_pipeline *pipeline;
    int num_rounds = argc == 3 ? atoi(argv[2]) : 0, i;
    if (num_rounds == 0 || dsbd_open(argv[1], "{\"num_threads\": 1}", &pipeline) != DSBD_OK)
        return 2;
    for (i = 0; i < 4 * num_rounds; i++) {
        if (i == num_rounds || i == 0)
            print_lost(i);
        ask_all(pipeline);
    }
    print_lost(i);
    return dsbd_close(pipeline);
}
