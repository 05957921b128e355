/* continue BUNDLE OPTIONS ID...: continue token ids with a bundle, print the new ones as they come.
 *
 *     cc continue.c $(pkg-config --cflags --libs dsbd_native) -o continue
 *     ./continue bundle/ '{"num_beams": 4, "max_new_tokens": 32}' 1 2 3
 */
#include <dsbd_native.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST_IDS = 4096 };

/* Tokens that all live beams agree on; they are never taken back. Any value but 0 cancels. */
static int print_step(const dsbd_step *step, void *context)
{
    size_t *num_printed = context;
    size_t i;
    for (i = 0; i < step->num_tokens; i++)
        printf("%s%" PRId64, (*num_printed)++ == 0 ? "" : ",", step->token_ids[i]);
    fflush(stdout);
    return 0;
}

static int fail(void)
{
    fprintf(stderr, "%s\n", dsbd_last_error());
    return EXIT_FAILURE;
}

int main(int num_arguments, char **arguments)
{
    static int64_t ids[MOST_IDS];
    dsbd_pipeline *pipeline = NULL;
    dsbd_request request = {0};
    char *result = NULL;
    size_t num_printed = 0;
    dsbd_status status;

    if (num_arguments < 4) {
        fprintf(stderr, "usage: continue BUNDLE OPTIONS ID...\n");
        return EXIT_FAILURE;
    }
    while (request.num_prompt_ids < MOST_IDS && arguments[3 + request.num_prompt_ids] != NULL) {
        ids[request.num_prompt_ids] = strtoll(arguments[3 + request.num_prompt_ids], NULL, 10);
        request.num_prompt_ids++;
    }
    if (dsbd_open(arguments[1], "{\"num_threads\": 4}", &pipeline) != DSBD_OK)
        return fail();
    request.prompt_ids = ids;
    request.options = arguments[2];
    request.on_step = print_step;
    request.on_step_context = &num_printed;
    status = dsbd_generate(pipeline, &request, &result);
    if (status == DSBD_OK)
        printf("\n%s\n", result); /* all sequences and the statistics, in JSON */
    else
        fail();
    dsbd_free(result);
    dsbd_close(pipeline);
    return status;
}
