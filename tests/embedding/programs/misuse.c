/* misuse BUNDLE: every call that is wrong; prints its name, its status and the message. */
#include <stdio.h>

#include "dsbd.h"

static char *result;

static int stop_at_once(const dsbd_step *step, void *context)
{
    ++*(int *)context;
    return step != NULL;
}

static int close_within(const dsbd_step *step, void *context)
{
    (void)step;
    return dsbd_close(context) != DSBD_OK && dsbd_close(context) != DSBD_ERROR;
}

static void show(const char *name, dsbd_status status)
{
    printf("%s\t%d\t%s\n", name, status, status == DSBD_OK ? "" : dsbd_last_error());
}

static int ask_within(const dsbd_step *step, void *context)
{
    dsbd_request request = {0};
    request.prompt = "ab";
    show("generate: one beyond the queue", dsbd_generate(context, &request, NULL));
    return step != NULL;
}

static void ask(const char *name, dsbd_pipeline *pipeline, dsbd_request request)
{
    show(name, dsbd_generate(pipeline, &request, &result));
    if (result != NULL)
        printf("%s\t0\tleft a result\n", name);
    dsbd_free(result);
}

static dsbd_request prompt(const char *text, const char *options)
{
    dsbd_request request = {0};
    request.prompt = text;
    request.options = options;
    return request;
}

static void open_wrongly(const char *bundle)
{
    dsbd_pipeline *pipeline = (dsbd_pipeline *)&result;
    show("open: no place", dsbd_open(bundle, NULL, NULL));
    show("open: no bundle", dsbd_open(NULL, NULL, &pipeline));
    show("open: a place is cleared", pipeline == NULL ? DSBD_OK : DSBD_INTERNAL);
    show("open: nowhere", dsbd_open("/no/such/bundle", NULL, &pipeline));
    show("open: not UTF-8", dsbd_open("\xff\xfe", NULL, &pipeline));
    show("open: no JSON", dsbd_open(bundle, "{provider: cpu}", &pipeline));
    show("open: no object", dsbd_open(bundle, "[1]", &pipeline));
    show("open: unknown setting", dsbd_open(bundle, "{\"bundle\": \"x\"}", &pipeline));
    show("open: wrong type", dsbd_open(bundle, "{\"num_threads\": true}", &pipeline));
    show("open: wrong provider", dsbd_open(bundle, "{\"provider\": \"abacus\"}", &pipeline));
    show("open: wrong limit", dsbd_open(bundle, "{\"max_requests\": 0}", &pipeline));
}

static void ask_wrongly(dsbd_pipeline *pipeline)
{
    dsbd_request request = {0};
    int64_t ids[] = {1, 2, 1000000};
    int num_steps = 0;
    show("generate: no request", dsbd_generate(pipeline, NULL, &result));
    ask("generate: no prompt", pipeline, request);
    request = prompt("a", NULL);
    request.messages = "[]";
    ask("generate: two prompts", pipeline, request);
    ask("generate: not UTF-8", pipeline, prompt("ab\xc3(", NULL));
    ask("generate: options not UTF-8", pipeline, prompt("ab", "{\"seed\xff\": 1}"));
    ask("generate: options no JSON", pipeline, prompt("ab", "{"));
    ask("generate: unknown option", pipeline, prompt("ab", "{\"prompt\": \"x\"}"));
    ask("generate: wrong option", pipeline, prompt("ab", "{\"num_beams\": 0}"));
    ask("generate: lone surrogate", pipeline, prompt("ab", "{\"strategy\": \"\\ud800\"}"));
    ask("generate: too long", pipeline, prompt("ab", "{\"max_new_tokens\": 100000}"));
    request = prompt(NULL, NULL);
    request.prompt_ids = ids;
    request.num_prompt_ids = 3;
    ask("generate: id out of range", pipeline, request);
    request.num_prompt_ids = (size_t)-1;
    ask("generate: too many ids", pipeline, request);
    request = prompt(NULL, NULL);
    request.messages = "{\"role\": \"user\"}";
    ask("chat: no array", pipeline, request);
    request.messages = "[{\"role\": \"user\", \"content\": \"Hi\"}]";
    ask("chat: no template", pipeline, request);
    request = prompt("ab", "{\"max_new_tokens\": 32}");
    request.on_step = stop_at_once;
    request.on_step_context = &num_steps;
    ask("generate: cancelled", pipeline, request);
    show("generate: no step after it", num_steps == 1 ? DSBD_OK : DSBD_INTERNAL);
    show("stats: no place", dsbd_stats(pipeline, NULL));
    request = prompt("ab", NULL);
    show("generate: no result wanted", dsbd_generate(pipeline, &request, NULL));
}

static void ask_too_many(const char *bundle)
{
    dsbd_pipeline *pipeline;
    int64_t ids[] = {1, 2, 3};
    dsbd_request request = prompt(NULL, "{\"strategy\": \"greedy\", \"max_new_tokens\": 2000}");
    dsbd_open(bundle, "{\"max_requests\": 1, \"max_queued\": 0}", &pipeline);
    request.prompt_ids = ids;
    request.num_prompt_ids = 3;
    request.on_step = ask_within;
    request.on_step_context = pipeline;
    dsbd_generate(pipeline, &request, NULL);
    dsbd_close(pipeline);
}

static void use_after_close(dsbd_pipeline *pipeline)
{
    dsbd_request request = prompt("ab", NULL);
    request.on_step = close_within;
    request.on_step_context = pipeline;
    show("close: while a request runs", dsbd_generate(pipeline, &request, NULL));
    ask("generate: closed", pipeline, prompt("ab", NULL));
    ask("generate: never opened", (dsbd_pipeline *)&result, prompt("ab", NULL));
    ask("generate: NULL", NULL, prompt("ab", NULL));
    show("stats: closed", dsbd_stats(pipeline, &result));
    show("close: closed", dsbd_close(pipeline));
    show("close: NULL", dsbd_close(NULL));
    dsbd_free(NULL);
}

int main(int argc, char **argv)
{
    dsbd_pipeline *pipeline;
    (void)argc;
    show("no error yet", dsbd_last_error()[0] == '\0' ? DSBD_OK : DSBD_INTERNAL);
    open_wrongly(argv[1]);
    if (dsbd_open(argv[1], NULL, &pipeline) != DSBD_OK)
        return 1;
    ask_wrongly(pipeline);
    ask_too_many(argv[1]);
    use_after_close(pipeline);
    return 0;
}
