/* continue BUNDLE PROMPT [OPTIONS]: continue a text, and print the new text as it becomes final.
 *
 *     export PKG_CONFIG_PATH=DIR/lib/pkgconfig   # DIR: where dsbd_native is installed
 *     libraries=$(pkg-config --variable=libdir dsbd_native)
 *     cc continue.c $(pkg-config --cflags --libs dsbd_native) -Wl,-rpath,"$libraries" -o continue
 *     ./continue bundle/ "def read_json(" '{"num_beams": 4, "max_new_tokens": 32}'
 */
#include <dsbd_native.h>
#include <stdio.h>
#include <stdlib.h>

/* Text that all live beams agree on; it is never taken back. Any value but 0 cancels. Its tokens
 * are step->token_ids. */
static int print_step(const dsbd_step *step, void *context)
{
    (void)context;
    fwrite(step->text, 1, step->num_text_bytes, stdout);
    fflush(stdout);
    return ferror(stdout);
}

static int fail(void)
{
    fprintf(stderr, "%s\n", dsbd_last_error());
    return EXIT_FAILURE;
}

int main(int num_arguments, char **arguments)
{
    dsbd_pipeline *pipeline = NULL;
    dsbd_request request = {0};
    char *result = NULL;
    dsbd_status status;

    if (num_arguments != 3 && num_arguments != 4) {
        fprintf(stderr, "usage: continue BUNDLE PROMPT [OPTIONS]\n");
        return EXIT_FAILURE;
    }
    if (dsbd_open(arguments[1], "{\"num_threads\": 4}", &pipeline) != DSBD_OK)
        return fail();
    request.prompt = arguments[2]; /* or prompt_ids and num_prompt_ids */
    request.options = arguments[3]; /* NULL: the defaults */
    request.on_step = print_step;
    status = dsbd_generate(pipeline, &request, &result);
    if (status == DSBD_OK)
        printf("\n%s\n", result); /* all sequences and the statistics, in JSON */
    else
        fail();
    dsbd_free(result);
    dsbd_close(pipeline);
    return status;
}
