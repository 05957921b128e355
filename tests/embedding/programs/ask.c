/* ask BUNDLE SETTINGS: answer the lines of stdin, each KIND TAB PROMPT TAB OPTIONS. Print for each
   what was streamed, as id:logprob ... TAB text in hexadecimal TAB, then the result in JSON, or the
   status and the message. The statistics of the pipeline go to stderr. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dsbd.h"

enum { LINE_BYTES = 1 << 16 };

typedef struct streamed {
    char text[LINE_BYTES];
    size_t num_bytes;
} streamed;

static int print_step(const dsbd_step *step, void *context)
{
    streamed *all = context;
    size_t i;
    for (i = 0; i < step->num_tokens; i++)
        printf("%lld:%.17g ", (long long)step->token_ids[i], step->token_logprobs[i]);
    memcpy(all->text + all->num_bytes, step->text, step->num_text_bytes + 1);
    all->num_bytes += step->num_text_bytes;
    return 0;
}

static size_t parse_ids(char *text, int64_t *ids)
{
    size_t num_ids = 0;
    char *id;
    for (id = strtok(text, " "); id != NULL; id = strtok(NULL, " "))
        ids[num_ids++] = strtoll(id, NULL, 10);
    return num_ids;
}

static void answer(dsbd_pipeline *pipeline, char *line)
{
    static streamed all;
    static int64_t ids[LINE_BYTES];
    dsbd_request request = {0};
    dsbd_status status;
    size_t i;
    char *prompt = strchr(line, '\t') + 1, *options = strchr(prompt, '\t') + 1, *result;
    prompt[-1] = options[-1] = options[strcspn(options, "\n")] = '\0';
    if (strcmp(line, "text") == 0)
        request.prompt = prompt;
    else if (strcmp(line, "chat") == 0)
        request.messages = prompt;
    else
        request.num_prompt_ids = parse_ids(prompt, ids), request.prompt_ids = ids;
    request.options = options;
    request.on_step = print_step;
    request.on_step_context = &all;
    all.text[all.num_bytes = 0] = '\0';
    status = dsbd_generate(pipeline, &request, &result);
    putchar('\t');
    for (i = 0; i < all.num_bytes; i++)
        printf("%02x", (unsigned char)all.text[i]);
    if (status == DSBD_OK)
        printf("\t%s\n", result);
    else
        printf("\t%d %s\n", status, dsbd_last_error());
    dsbd_free(result);
}

int main(int argc, char **argv)
{
    static char line[LINE_BYTES];
    dsbd_pipeline *pipeline;
    char *stats;
    if (argc != 3 || dsbd_open(argv[1], argv[2], &pipeline) != DSBD_OK) {
        fprintf(stderr, "%s\n", dsbd_last_error());
        return 1;
    }
    while (fgets(line, sizeof line, stdin) != NULL)
        answer(pipeline, line);
    if (dsbd_stats(pipeline, &stats) != DSBD_OK)
        return 1;
    fprintf(stderr, "%s\n", stats);
    dsbd_free(stats);
    return dsbd_close(pipeline);
}
