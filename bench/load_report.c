/*
 * load_report.c - histograms and results, as text for people and JSON for programs.
 */
#include "load.h"

#include <stdio.h>

static unsigned cell_of(uint64_t v)
{
    unsigned shift;

    if (v < HIST_STEPS)
        return (unsigned)v;
    shift = 63u - (unsigned)__builtin_clzll(v) - HIST_STEP_BITS;
    return (shift + 1) * HIST_STEPS + (unsigned)(v >> shift) - HIST_STEPS;
}

/* The middle of a cell. */
static uint64_t value_of_cell(unsigned cell)
{
    unsigned shift;

    if (cell < HIST_STEPS)
        return cell;
    shift = cell / HIST_STEPS - 1;
    return ((uint64_t)(cell % HIST_STEPS + HIST_STEPS) << shift) + ((uint64_t)1 << shift) / 2;
}

void hist_add(struct hist *h, uint64_t ns)
{
    unsigned cell = cell_of(ns);

    h->cells[cell < HIST_CELLS ? cell : HIST_CELLS - 1]++;
    h->n++;
    h->sum_ns += (double)ns;
    if (ns > h->max_ns)
        h->max_ns = ns;
}

uint64_t hist_quantile(const struct hist *h, double q)
{
    uint64_t want = (uint64_t)(q * (double)h->n), seen = 0;

    for (unsigned i = 0; i < HIST_CELLS; i++) {
        seen += h->cells[i];
        if (seen > want)
            return value_of_cell(i) < h->max_ns ? value_of_cell(i) : h->max_ns;
    }
    return h->max_ns;
}

static const char *const error_names[ERROR_KINDS] = {
    "connect", "reset", "no_response", "cut", "bad_response", "timeout",
};

static const char *const check_names[CHECK_KINDS] = {
    "content_length", "content_type",   "json_error_body", "retry_after",
    "retry_after_ms", "x_should_retry", "reason",          "request_id",
};

static const struct {
    const char *name;
    size_t offset;
} hists[] = {
    {"total_ms", offsetof(struct results, total)},
    {"ttfb_ms", offsetof(struct results, ttfb)},
    {"inter_event_ms", offsetof(struct results, inter_event)},
    {"event_lag_ms", offsetof(struct results, lag)},
    {"wait_ms", offsetof(struct results, wait)},
};

static const struct {
    const char *name;
    double q;
} quantiles[] = {{"p50", 0.5}, {"p90", 0.9}, {"p95", 0.95}, {"p99", 0.99}, {"p999", 0.999}};

static const struct hist *hist_of(const struct results *r, size_t i)
{
    return (const void *)((const char *)r + hists[i].offset);
}

static double seconds_of(const struct results *r)
{
    return r->end_ns > r->start_ns ? (double)(r->end_ns - r->start_ns) / 1e9 : 0;
}

static double rate_of(const struct results *r)
{
    return seconds_of(r) > 0 ? (double)r->in_window / seconds_of(r) : 0;
}

void results_reason(struct results *r, struct slice name)
{
    for (size_t i = 0; i < REASONS_MAX; i++) {
        if (r->reasons[i].name[0] == '\0') {
            size_t n = size_min(name.n, REASON_NAME_MAX - 1);

            for (size_t k = 0; k < n; k++) /* goes into JSON as it is */
                r->reasons[i].name[k] = name.p[k] > ' ' && name.p[k] != '"' && name.p[k] != '\\' ? name.p[k]
                                                                                                 : '_';
        }
        if (slice_eq(slice_of(r->reasons[i].name), name) || i == REASONS_MAX - 1) {
            r->reasons[i].n++;
            return;
        }
    }
}

static uint64_t error_sum(const struct results *r)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < ERROR_KINDS; i++)
        sum += r->errors[i];
    return sum;
}

void results_progress(const struct results *r, const struct results *before, double seconds,
                      unsigned in_flight)
{
    fprintf(stderr, "%5.1f s  %9.0f/s  in flight %u", (double)(clock_ns() - r->start_ns) / 1e9,
            (double)(r->completed - before->completed) / seconds, in_flight);
    for (unsigned i = 100; i < ARRAY_LEN(r->status); i++) {
        if (r->status[i] != before->status[i])
            fprintf(stderr, "  %u: %llu", i, (unsigned long long)(r->status[i] - before->status[i]));
    }
    if (error_sum(r) != error_sum(before))
        fprintf(stderr, "  errors: %llu", (unsigned long long)(error_sum(r) - error_sum(before)));
    fputc('\n', stderr);
}

static void print_counts(const struct results *r)
{
    for (unsigned i = 100; i < ARRAY_LEN(r->status); i++) {
        if (r->status[i] > 0)
            printf("status %u       %llu\n", i, (unsigned long long)r->status[i]);
    }
    for (size_t i = 0; i < REASONS_MAX && r->reasons[i].name[0] != '\0'; i++)
        printf("refused         %llu  %s\n", (unsigned long long)r->reasons[i].n, r->reasons[i].name);
    if (r->malformed > 0)
        printf("malformed 429   %llu\n", (unsigned long long)r->malformed);
    for (size_t i = 0; i < CHECK_KINDS; i++) {
        if (r->failed_checks[i] > 0)
            printf("  without       %llu  %s\n", (unsigned long long)r->failed_checks[i], check_names[i]);
    }
    for (size_t i = 0; i < ERROR_KINDS; i++) {
        if (r->errors[i] > 0)
            printf("error           %llu  %s\n", (unsigned long long)r->errors[i], error_names[i]);
    }
    if (r->aborted_early + r->aborted_late > 0)
        printf("aborted         %llu before the first byte, %llu after it\n",
               (unsigned long long)r->aborted_early, (unsigned long long)r->aborted_late);
    if (r->unfinished > 0)
        printf("unfinished      %llu\n", (unsigned long long)r->unfinished);
    if (r->late_arrivals > 0)
        printf("late arrivals   %llu found no free slot at their time\n",
               (unsigned long long)r->late_arrivals);
}

void results_print(const struct results *r, const struct options *o)
{
    printf("%s  concurrency %u  %.2f s\n", o->url, o->concurrency, seconds_of(r));
    printf("calls           %llu  %.0f/s\n", (unsigned long long)r->completed, rate_of(r));
    printf("connections     %llu\nbytes in        %llu\n", (unsigned long long)r->connects,
           (unsigned long long)r->bytes_in);
    if (r->events > 0)
        printf("events          %llu\n", (unsigned long long)r->events);
    print_counts(r);
    printf("%-15s %10s %10s %10s %10s %10s %10s %10s\n", "ms", "mean", "p50", "p90", "p95", "p99", "p99.9",
           "max");
    for (size_t i = 0; i < ARRAY_LEN(hists); i++) {
        const struct hist *h = hist_of(r, i);

        if (h->n == 0)
            continue;
        printf("%-15.*s %10.3f", (int)(strlen(hists[i].name) - 3), hists[i].name,
               h->sum_ns / (double)h->n / 1e6);
        for (size_t k = 0; k < ARRAY_LEN(quantiles); k++)
            printf(" %10.3f", (double)hist_quantile(h, quantiles[k].q) / 1e6);
        printf(" %10.3f\n", (double)h->max_ns / 1e6);
    }
}

static void json_hists(const struct results *r)
{
    for (size_t i = 0; i < ARRAY_LEN(hists); i++) {
        const struct hist *h = hist_of(r, i);

        printf(",\"%s\":{\"n\":%llu,\"mean\":%.4f", hists[i].name, (unsigned long long)h->n,
               h->n == 0 ? 0 : h->sum_ns / (double)h->n / 1e6);
        for (size_t k = 0; k < ARRAY_LEN(quantiles); k++)
            printf(",\"%s\":%.4f", quantiles[k].name, (double)hist_quantile(h, quantiles[k].q) / 1e6);
        printf(",\"max\":%.4f}", (double)h->max_ns / 1e6);
    }
}

void results_print_json(const struct results *r, const struct options *o)
{
    const char *comma = "";

    printf("{\"concurrency\":%u,\"seconds\":%.3f,\"started\":%llu,\"completed\":%llu,\"rate\":%.1f,"
           "\"unfinished\":%llu,"
           "\"late_arrivals\":%llu,\"connections\":%llu,\"bytes_in\":%llu,\"events\":%llu,\"statuses\":{",
           o->concurrency, seconds_of(r), (unsigned long long)r->started, (unsigned long long)r->completed,
           rate_of(r), (unsigned long long)r->unfinished, (unsigned long long)r->late_arrivals,
           (unsigned long long)r->connects, (unsigned long long)r->bytes_in, (unsigned long long)r->events);
    for (unsigned i = 100; i < ARRAY_LEN(r->status); i++) {
        if (r->status[i] > 0) {
            printf("%s\"%u\":%llu", comma, i, (unsigned long long)r->status[i]);
            comma = ",";
        }
    }
    printf("},\"refusals\":{");
    for (size_t i = 0; i < REASONS_MAX && r->reasons[i].name[0] != '\0'; i++)
        printf("%s\"%s\":%llu", i == 0 ? "" : ",", r->reasons[i].name, (unsigned long long)r->reasons[i].n);
    printf("},\"malformed_refusals\":%llu,\"malformed\":{", (unsigned long long)r->malformed);
    for (size_t i = 0; i < CHECK_KINDS; i++)
        printf("%s\"%s\":%llu", i == 0 ? "" : ",", check_names[i], (unsigned long long)r->failed_checks[i]);
    printf("},\"errors\":{");
    for (size_t i = 0; i < ERROR_KINDS; i++)
        printf("%s\"%s\":%llu", i == 0 ? "" : ",", error_names[i], (unsigned long long)r->errors[i]);
    printf("},\"aborted\":{\"before_first_byte\":%llu,\"after_first_byte\":%llu}",
           (unsigned long long)r->aborted_early, (unsigned long long)r->aborted_late);
    json_hists(r);
    printf("}\n");
}
