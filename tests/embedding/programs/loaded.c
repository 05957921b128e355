/* loaded LIBRARY BUNDLE: load the library for this program alone, use it in a thread that is not
   the first, and leave without closing anything. Prints the result. */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "dsbd.h"

static char *bundle;
static void *library;

static void *answer(void *unused)
{
    dsbd_status (*open)(const char *, const char *, dsbd_pipeline **);
    dsbd_status (*generate)(dsbd_pipeline *, const dsbd_request *, char **);
    const char *(*last_error)(void);
    dsbd_pipeline *pipeline;
    dsbd_request request = {0};
    char *result = NULL;
    *(void **)&open = dlsym(library, "dsbd_open");
    *(void **)&generate = dlsym(library, "dsbd_generate");
    *(void **)&last_error = dlsym(library, "dsbd_last_error");
    request.prompt = "ab";
    request.options = "{\"max_new_tokens\": 4, \"seed\": 0}";
    if (open(bundle, NULL, &pipeline) || generate(pipeline, &request, &result))
        puts(last_error());
    else
        puts(result);
    return unused;
}

int main(int argc, char **argv)
{
    pthread_t thread;
    library = argc == 3 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (library == NULL)
        return 2;
    bundle = argv[2];
    pthread_create(&thread, NULL, answer, NULL);
    pthread_join(thread, NULL);
    exit(0);
}
