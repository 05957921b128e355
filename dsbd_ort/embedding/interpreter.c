/* Start the Python of the environment that the library was built in, untouched by the host's. */
#define _GNU_SOURCE
#include <Python.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

#include "library.h"

static pthread_once_t is_started = PTHREAD_ONCE_INIT;
static char failure[1024];

static PyStatus initialize(void)
{
    PyPreConfig before;
    PyPreConfig_InitIsolatedConfig(&before);
    before.use_environment = 1; /* for PYTHONMALLOC: memcheck sees no other allocator's blocks */
    before.utf8_mode = 1;       /* file names are UTF-8 in a host that never called setlocale too */
    PyStatus status = Py_PreInitialize(&before);
    if (PyStatus_Exception(status))
        return status;
    PyConfig config; /* isolated: no signal handlers, no PYTHONPATH, no stdio changed */
    PyConfig_InitIsolatedConfig(&config);
    status = PyConfig_SetBytesString(&config, &config.program_name, DSBD_PYTHON);
    if (!PyStatus_Exception(status))
        status = Py_InitializeFromConfig(&config);
    PyConfig_Clear(&config);
    return status;
}

static void start(void)
{
    if (Py_IsInitialized()) /* the host is a Python program */
        return;
    if (access(DSBD_PYTHON, X_OK) != 0) {
        snprintf(failure, sizeof failure,
                 "%s, which this library was built with, is gone; build the library again",
                 DSBD_PYTHON);
        return;
    }
    /* A host that loads this library for itself alone hides Python from Python's extensions. */
    dlopen(DSBD_LIBPYTHON, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL);
    PyStatus status = initialize();
    if (PyStatus_Exception(status))
        snprintf(failure, sizeof failure, "internal error: Python does not start: %s",
                 status.err_msg == NULL ? "Python asks to exit" : status.err_msg);
    else
        PyEval_SaveThread();
}

const char *dsbd_start_interpreter(void)
{
    pthread_once(&is_started, start);
    return failure[0] == '\0' ? NULL : failure;
}
