/* own_text BUNDLE PROMPT OPTIONS: answer with functions for text of its own, a token a byte. Prints
   the steps' text in hexadecimal, then the result; "refuse" as prompt is refused by them. */
#include <stdio.h>
#include <string.h>

#include "dsbd_native.h"

enum { SPECIAL = 200 }; /* the token of '^', which no text has */

static int64_t encode(const char *text, size_t num_bytes, int64_t *ids, size_t room, void *context)
{
    size_t i;
    ++*(int *)context;
    if (num_bytes == 6 && memcmp(text, "refuse", 6) == 0)
        return -1;
    for (i = 0; i < num_bytes && i < room; i++) /* of printable characters */
        ids[i] = text[i] == '^' ? SPECIAL : text[i] - 33;
    return (int64_t)num_bytes;
}

/* The printable characters of ASCII, in place of all others a tilde. */
static int64_t decode(const int64_t *ids, size_t num_ids, char *text, size_t room, void *context)
{
    size_t i, size = 0;
    ++*(int *)context;
    for (i = 0; i < num_ids && size < room; i++)
        if (ids[i] != SPECIAL)
            text[size++] = ids[i] < 94 ? (char)(ids[i] + 33) : '~';
    return (int64_t)size;
}

static int print_step(const dsbd_step *step, void *context)
{
    size_t i;
    (void)context;
    for (i = 0; i < step->num_text_bytes; i++)
        printf("%02x", (unsigned char)step->text[i]);
    return 0;
}

int main(int argc, char **argv)
{
    int num_calls = 0;
    dsbd_text text = {encode, decode, &num_calls}, none = {NULL, NULL, NULL};
    dsbd_pipeline *pipeline = NULL;
    dsbd_request request = {0};
    char *result = NULL;
    dsbd_status status;
    if (argc != 4 || dsbd_open(argv[1], NULL, &pipeline) != DSBD_OK)
        return 1;
    if (dsbd_set_text(pipeline, &none) != DSBD_ERROR || dsbd_set_text(NULL, &text) != DSBD_ERROR)
        return 2;
    if (dsbd_set_text(pipeline, &text) != DSBD_OK)
        return 3;
    request.prompt = argv[2];
    request.options = argv[3];
    request.on_step = print_step;
    status = dsbd_generate(pipeline, &request, &result);
    printf("\n%s\n", status == DSBD_OK ? result : dsbd_last_error());
    dsbd_free(result);
    dsbd_close(pipeline);
    return status == DSBD_OK && num_calls == 0 ? 4 : 0;
}
