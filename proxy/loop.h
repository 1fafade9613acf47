/*
 * loop.h - one event loop a thread: its clock, its deadlines, its end of turn,
 * and the way other threads reach it.
 *
 * A turn is: poll, callbacks of what happened, end of turn. The end of a turn
 * runs the deferred tasks (and those that they defer) before the loop may sleep:
 * callbacks that must not run inside the call that caused them, batches that gather a
 * whole turn, frees. Everything here belongs to the loop's own thread but loop_post and loop_stop.
 */
#ifndef LG_LOOP_H
#define LG_LOOP_H

#include "base.h"

struct loop;
struct uv_loop_s;

/* A new loop, at boot only (the process ends when it cannot be had). */
struct loop *loop_new(unsigned index);
/* Runs until loop_stop and nothing is left to close. */
void loop_run(struct loop *l);
/* From any thread: loop_run returns at the end of this turn. */
void loop_stop(struct loop *l);
/* After loop_run returned and all handles are closed: frees it. Warns about what was left open. */
void loop_free(struct loop *l);

struct uv_loop_s *loop_uv(struct loop *l);
unsigned loop_index(const struct loop *l);
/* Milliseconds of a monotonic clock, read once a turn. */
uint64_t loop_now_ms(const struct loop *l);
/* Microseconds of the same clock, read now: for durations that are reported. */
uint64_t loop_now_us(void);
/*
 * 64 KiB, lent to whoever fills and empties it within one callback. A stream reads into it: what on_data is
 * given stands there, so a room must not fill it while it still looks at such bytes.
 */
#define LOOP_SCRATCH_BYTES 65536
char *loop_scratch(struct loop *l);

/* One pointer that a room keeps for each loop; loop_free calls drop(p). NULL until it is set. */
enum loop_slot { LOOP_SLOT_STREAM, LOOP_SLOT_LISTENER, LOOP_SLOTS };
void *loop_slot(const struct loop *l, enum loop_slot slot);
void loop_slot_set(struct loop *l, enum loop_slot slot, void *p, void (*drop)(void *p));

/* --- deadlines ------------------------------------------------------------------------------------------ */

/*
 * Embedded in what waits. Moving a deadline to a later time costs a store (the usual case: progress was
 * made); an earlier time, arming and cancelling cost O(log n). It fires at most ~1 ms late, once, then is
 * unarmed.
 */
struct deadline {
    void (*fire)(struct deadline *d);
    uint64_t due_ms_;
    uint64_t key_ms_; /* what the heap is ordered by: never later than due_ms_ */
    uint32_t index_;  /* place in the heap + 1; 0: not armed */
};

void deadline_init(struct deadline *d, void (*fire)(struct deadline *d));
/* Arms it or moves it to `due_ms` (of loop_now_ms). False: no memory, it is as it was. */
MUST_CHECK bool deadline_set(struct loop *l, struct deadline *d, uint64_t due_ms);
/* No-op when not armed. Must be called before the memory goes. */
void deadline_cancel(struct loop *l, struct deadline *d);
static inline bool deadline_armed(const struct deadline *d)
{
    return d->index_ != 0;
}

/* --- the end of the turn -------------------------------------------------------------------------------- */

/* Embedded in what wants to run later in this turn. */
struct task {
    struct list_node node_;
    void (*run)(struct task *t);
    bool last_; /* which of the two lists it is in */
};

void task_init(struct task *t, void (*run)(struct task *t));
/* Runs t once at the end of this turn, after what was deferred before it. No-op when already deferred. */
void loop_defer(struct loop *l, struct task *t);
/*
 * Runs t after every loop_defer task of this turn, also those deferred meanwhile: batches that gather the
 * whole turn.
 */
void loop_defer_last(struct loop *l, struct task *t);
/* Takes it back; no-op when not deferred. Must be called before the memory goes. */
void task_cancel(struct loop *l, struct task *t);
/*
 * mem_free(p) when the turn has ended: whoever still holds p in a frame below may finish. Never fails: p's
 * own bytes are used to link it (at least 16).
 */
void loop_free_later(struct loop *l, void *p);

/* --- other threads -------------------------------------------------------------------------------------- */

/* From any thread: fn(l, arg) on the loop's thread, soon. Order is kept. False: no memory. */
MUST_CHECK bool loop_post(struct loop *l, void (*fn)(struct loop *l, void *arg), void *arg);

/*
 * The longest turn (callbacks of one poll, ms rounded up) since the last call; for the loop-lag metric. Own
 * thread.
 */
uint64_t loop_take_longest_turn_us(struct loop *l);

#endif
