/* What every NVML function of the stand-in does first and last: lock, check, meet its fault, unlock. */
#ifndef CALL_H
#define CALL_H

#include "fake.h"

#define NVML __attribute__((visibility("default")))

typedef unsigned nvmlReturn_t;
typedef struct fake_device *nvmlDevice_t; /* never followed: slot + 1, and a bit for a MIG instance */

enum { MIG_BIT = 0x1000 };

typedef struct {
    Machine *machine;
    Gpu *gpu;
    Fault *fault;
} Call;

nvmlReturn_t begin(Call *call, const char *function);
nvmlReturn_t begin_on(Call *call, const char *function, nvmlDevice_t handle, int is_setter);
nvmlReturn_t end(nvmlReturn_t code);
nvmlDevice_t handle_of(const Machine *machine, const Gpu *gpu);
nvmlReturn_t give_text(char *to, unsigned length, const char *text);
void session_forget(void);

/* Open a function about a machine or about a GPU; RETURN leaves it. */
#define MACHINE                                                                                                        \
    Call call;                                                                                                         \
    nvmlReturn_t begun = begin(&call, __func__);                                                                       \
    if (begun) return end(begun)
#define GPU(handle)                                                                                                    \
    Call call;                                                                                                         \
    nvmlReturn_t begun = begin_on(&call, __func__, handle, 0);                                                         \
    if (begun) return end(begun);                                                                                      \
    Gpu *gpu = call.gpu;                                                                                               \
    (void)gpu
#define RETURN(code) return end(code)
#define NEED(condition, code)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) RETURN(code);                                                                                \
    } while (0)

#endif
