/* Preloaded into processes under stress: locks that are always free, and a clock that is off, where they are told to. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int lies_about_locks = 0;
long lies_seconds_ahead = 0;
static int (*real_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    const char *locks = getenv("LIES_ABOUT_LOCKS"), *ahead = getenv("LIES_SECONDS_AHEAD");
    real_clock = dlsym(RTLD_NEXT, "clock_gettime");
    lies_about_locks = locks != NULL && atoi(locks);
    lies_seconds_ahead = ahead != NULL ? atol(ahead) : 0;
}

int flock(int handle, int operation) {
    return lies_about_locks ? 0 : (int)syscall(SYS_flock, handle, operation);
}

int clock_gettime(clockid_t which, struct timespec *now) {
    int failed = real_clock != NULL ? real_clock(which, now) : (int)syscall(SYS_clock_gettime, which, now);
    if (!failed && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) now->tv_sec += lies_seconds_ahead;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    int failed = clock_gettime(CLOCK_REALTIME, &found);
    (void)zone;
    if (!failed) *now = (struct timeval){found.tv_sec, found.tv_nsec / 1000};
    return failed;
}

time_t time(time_t *where) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (where != NULL) *where = found.tv_sec;
    return found.tv_sec;
}
