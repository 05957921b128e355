/* Functions that library.c calls in Python, defined in calls.py. cffi reads this too: no
 * preprocessor. */
dsbd_status dsbd_python_open(const char *bundle, const char *settings, uintptr_t *number);
dsbd_status dsbd_python_generate(uintptr_t number, const dsbd_request *request, char **result);
dsbd_status dsbd_python_stats(uintptr_t number, char **stats);
dsbd_status dsbd_python_close(uintptr_t number);
