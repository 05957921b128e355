/* Functions shared by the parts of the library; callers include only dsbd.h. */
#ifndef DSBD_LIBRARY_H
#define DSBD_LIBRARY_H

#include "dsbd.h"
#include "python_calls.h"

/* library.c: keep the message for dsbd_last_error; copy a text for dsbd_free, NULL without memory. */
void dsbd_set_error(const char *message);
char *dsbd_copy_text(const char *text);

/* interpreter.c: start Python once; return NULL, or why it cannot be started. */
const char *dsbd_start_interpreter(void);

/* Written by cffi: import calls.py once; return 0, or -1 if that failed. */
int dsbd_start_calls(void);

#endif
