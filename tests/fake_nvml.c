/* A driver's management library with one device, whose answers are known: it draws 500 W. */
#include <string.h>
#include <time.h>

typedef struct {
    unsigned int field_id, scope_id;
    long long timestamp, latency_usec;
    int value_type, code;
    unsigned long long value;
} field_value;

static int the_device;
int num_asked_for_ecc = 0;
int num_open = 0;

int nvmlInit_v2(void) { num_open++; return 0; }
int nvmlShutdown(void) { num_open--; return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device) {
    if (strcmp(address, "00000000:65:00.0") != 0) return 6;
    *device = &the_device;
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (strcmp(uuid, "GPU-1234") != 0) return 6;
    *device = &the_device;
    return 0;
}
int nvmlDeviceGetName(void *device, char *name, unsigned int length) {
    strncpy(name, "Made-up GPU", length);
    return device == &the_device ? 0 : 2;
}
int nvmlDeviceGetClockInfo(void *device, unsigned int type, unsigned int *clock) {
    *clock = type == 1 ? 1245 : 2619;
    return device == &the_device ? 0 : 2;
}
int nvmlDeviceGetMaxClockInfo(void *device, unsigned int type, unsigned int *clock) {
    *clock = type == 1 ? 1980 : 2619;
    return device == &the_device ? 0 : 2;
}
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned int *limit) {
    *limit = 700000;
    return device == &the_device ? 0 : 2;
}
int nvmlDeviceGetTemperature(void *device, unsigned int sensor, unsigned int *celsius) {
    *celsius = 61;
    return device == &the_device && sensor == 0 ? 0 : 2;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned int *milliwatts) {
    *milliwatts = 500000;
    return device == &the_device ? 0 : 2;
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *millijoules = 500ULL * (now.tv_sec * 1000ULL + now.tv_nsec / 1000000);
    return device == &the_device ? 0 : 2;
}
/* Only the older name, as in older drivers. */
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    *reasons = 0x4;
    return device == &the_device ? 0 : 2;
}
int nvmlDeviceGetTotalEccErrors(void *device, unsigned int kind, unsigned int counter,
                                unsigned long long *count) {
    num_asked_for_ecc++;
    (void)device, (void)counter;
    if (kind == 0) return 3; /* not supported: stays so */
    *count = 2;
    return num_asked_for_ecc == 2 ? 999 : 0; /* once unknown: may be known later */
}
int nvmlDeviceGetPcieReplayCounter(void *device, unsigned int *count) {
    *count = 7;
    return device == &the_device ? 0 : 2;
}
int nvmlDeviceGetFieldValues(void *device, int num_values, field_value *values) {
    for (int i = 0; i < num_values; i++) {
        values[i].code = values[i].field_id == 52 || values[i].field_id == 59 ? 3 : 0;
        values[i].value = values[i].field_id;
    }
    return device == &the_device ? 0 : 2;
}
