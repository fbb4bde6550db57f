/* SPDX-License-Identifier: Apache-2.0 */
#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char error_text[TE_ERROR_TEXT_BYTES] = "no error";
static _Thread_local uint64_t failures;

/* The part of a path from "csrc/" on: texts do not depend on where the library was built. */
static const char *short_path(const char *file)
{
    const char *last = NULL;
    const char *hit = strstr(file, "csrc/");
    while (hit != NULL) {
        last = hit;
        hit = strstr(hit + 1, "csrc/");
    }
    return last != NULL ? last : file;
}

te_status te_fail(te_status kind, const char *file, int line, const char *format, ...)
{
    va_list arguments;
    int used = snprintf(error_text, sizeof error_text, "%s:%d: ", short_path(file), line);
    if (used < 0 || (size_t)used >= sizeof error_text) used = 0;
    va_start(arguments, format);
    (void)vsnprintf(error_text + used, sizeof error_text - (size_t)used, format, arguments);
    va_end(arguments);
    failures++;
    return kind;
}

uint64_t te_failure_count(void)
{
    return failures;
}

void te_set_error(const char *text)
{
    (void)snprintf(error_text, sizeof error_text, "%s", text);
}

const char *te_last_error(void)
{
    return error_text;
}
