/* The functions of dsbd.h: check pointers, start Python once, call it. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "library.h"

static _Thread_local char last_error[2048];

void dsbd_set_error(const char *message)
{
    snprintf(last_error, sizeof last_error, "%s", message);
}

char *dsbd_copy_text(const char *text)
{
    size_t num_bytes = strlen(text) + 1;
    char *copy = malloc(num_bytes);
    return copy == NULL ? NULL : memcpy(copy, text, num_bytes);
}

static dsbd_status refused(const char *message)
{
    dsbd_set_error(message);
    return DSBD_ERROR;
}

static bool python_is_ready(void)
{
    const char *failure = dsbd_start_interpreter();
    if (failure == NULL && dsbd_start_calls() != 0)
        failure = "internal error: Python could not load dsbd_ort; its message is on stderr";
    if (failure != NULL)
        dsbd_set_error(failure);
    return failure == NULL;
}

dsbd_status dsbd_open(const char *bundle, const char *settings, dsbd_pipeline **pipeline)
{
    if (pipeline == NULL)
        return refused("pipeline is NULL; expected a place for the opened pipeline");
    *pipeline = NULL;
    if (bundle == NULL)
        return refused("bundle is NULL; expected the folder of a bundle");
    if (!python_is_ready())
        return DSBD_INTERNAL;
    uintptr_t number = 0;
    dsbd_status status = dsbd_python_open(bundle, settings, &number);
    *pipeline = (dsbd_pipeline *)number;
    return status;
}

dsbd_status dsbd_generate(dsbd_pipeline *pipeline, const dsbd_request *request, char **result)
{
    if (result != NULL)
        *result = NULL;
    if (request == NULL)
        return refused("request is NULL; expected a request");
    if ((request->prompt != NULL) + (request->prompt_ids != NULL) + (request->messages != NULL) != 1)
        return refused("a request needs exactly one of prompt, prompt_ids and messages");
    return python_is_ready() ? dsbd_python_generate((uintptr_t)pipeline, request, result)
                             : DSBD_INTERNAL;
}

dsbd_status dsbd_stats(const dsbd_pipeline *pipeline, char **stats)
{
    if (stats == NULL)
        return refused("stats is NULL; expected a place for the text");
    *stats = NULL;
    return python_is_ready() ? dsbd_python_stats((uintptr_t)pipeline, stats) : DSBD_INTERNAL;
}

dsbd_status dsbd_close(dsbd_pipeline *pipeline)
{
    if (pipeline == NULL)
        return DSBD_OK;
    return python_is_ready() ? dsbd_python_close((uintptr_t)pipeline) : DSBD_INTERNAL;
}

void dsbd_free(char *text)
{
    free(text);
}

const char *dsbd_last_error(void)
{
    return last_error;
}

const char *dsbd_version(void)
{
    return DSBD_VERSION;
}
