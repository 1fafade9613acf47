/*
 * loadgen.c - an HTTP/1.1 load generator for LLM APIs: options, the loop, progress. load.h has the map.
 *
 * Closed loop: each of --concurrency slots begins its next call when the one before has ended (and
 * --think-ms have passed). Open loop (--rate): calls are due at random times (exponential gaps), whatever
 * the server does; one that finds no free slot waits for one, and its times count from when it was due.
 *
 * The measured time ends with --duration, --requests or SIGINT; calls still running then get --drain-ms.
 */
#include "load.h"

#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/un.h>
#include <unistd.h>

enum { BATCH = 512, BACKLOG_MAX = 1 << 20, REQUESTS_MAX = 65536, ERROR_PAUSE_MS = 10 };

#define NS_PER_MS ((uint64_t)1000000)

/* Arrivals that found no free slot: when they were due. */
struct backlog {
    uint64_t due_ns[BACKLOG_MAX]; /* a ring */
    size_t first, n;
};

static volatile sig_atomic_t interrupted;
static struct backlog backlog;

static void on_signal(int number UNUSED)
{
    interrupted = 1;
}

NORETURN static void fail(const char *what, const char *why)
{
    fprintf(stderr, "loadgen: %s: %s\n", what, why);
    exit(1);
}

NORETURN static void usage(int status)
{
    fputs("usage: loadgen --url http://HOST:PORT/PATH [options]\n"
          "  --concurrency N      calls at a time (64)\n"
          "  --duration S         seconds (10); --requests N: ends after N calls\n"
          "  --rate R             open loop: R calls a second, whatever the server does\n"
          "  --stream             asks for server-sent events\n"
          "  --events N  --delay-ms D  --ttft-ms T  --response-bytes N   asked of mock-llm\n"
          "  --body-bytes N       size of the request body (160); 0: GET\n"
          "  --model M[,M2...]    taken at random;  --tenants N: x-tenant-id t0 ... t(N-1)\n"
          "  --header 'k: v'      on each request, may be repeated\n"
          "  --abort-rate F       fraction of calls that are given up before or after their first byte\n"
          "  --think-ms N         pause between the calls of a slot\n"
          "  --timeout-ms N       gives a call up (120000);  --drain-ms N: patience at the end (5000)\n"
          "  --unix PATH          connects there;  --pin CPU;  --seed N\n"
          "  --json               results as JSON on stdout;  --quiet: no progress\n",
          status == 0 ? stdout : stderr);
    exit(status);
}

uint64_t load_random(struct load *l)
{
    uint64_t z = (l->random += 0x9e3779b97f4a7c15u); /* splitmix64 */

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

double load_uniform(struct load *l)
{
    return (double)(load_random(l) >> 11) / 9007199254740992.0;
}

/* ---- options ---- */

static double decimal(const char *s, double max)
{
    char *end;
    double v = strtod(s, &end);

    if (end == s || *end != '\0' || !(v >= 0 && v <= max))
        usage(2);
    return v;
}

static void parse_url(struct options *o)
{
    const char *p = o->url, *slash, *colon;
    size_t n;

    if (strncmp(p, "http://", 7) != 0)
        fail(p, "not an http:// URL");
    p += 7;
    slash = strchr(p, '/');
    n = slash == NULL ? strlen(p) : (size_t)(slash - p);
    if (n == 0 || n >= sizeof(o->host) || (slash != NULL && strlen(slash) >= sizeof(o->path)))
        fail(o->url, "too long, or no host");
    memcpy(o->host, p, n);
    o->host[n] = '\0';
    memcpy(o->path, slash == NULL ? "/" : slash, slash == NULL ? 2 : strlen(slash) + 1);
    colon = strrchr(o->host, ':');
    o->port = colon == NULL ? 80 : (unsigned)decimal(colon + 1, 65535);
}

enum {
    OPT_URL = 256,
    OPT_CONCURRENCY,
    OPT_DURATION,
    OPT_REQUESTS,
    OPT_RATE,
    OPT_STREAM,
    OPT_EVENTS,
    OPT_DELAY,
    OPT_TTFT,
    OPT_RESPONSE,
    OPT_BODY,
    OPT_MODEL,
    OPT_TENANTS,
    OPT_HEADER,
    OPT_ABORT,
    OPT_THINK,
    OPT_TIMEOUT,
    OPT_DRAIN,
    OPT_UNIX,
    OPT_PIN,
    OPT_SEED,
    OPT_JSON,
    OPT_QUIET,
    OPT_HELP,
};

static void set_option(struct options *o, int opt)
{
    switch (opt) {
    case OPT_URL:
        o->url = optarg;
        break;
    case OPT_CONCURRENCY:
        o->concurrency = (unsigned)decimal(optarg, 100000);
        break;
    case OPT_DURATION:
        o->duration_ns = (uint64_t)(decimal(optarg, 86400) * 1e9);
        break;
    case OPT_REQUESTS:
        o->requests = (uint64_t)decimal(optarg, 1e15);
        break;
    case OPT_RATE:
        o->rate = decimal(optarg, 1e7);
        break;
    case OPT_STREAM:
        o->stream = true;
        break;
    case OPT_EVENTS:
        o->events = (int64_t)decimal(optarg, 1e8);
        break;
    case OPT_DELAY:
        o->delay_ms = (int64_t)decimal(optarg, 3.6e6);
        break;
    case OPT_TTFT:
        o->ttft_ms = (int64_t)decimal(optarg, 3.6e6);
        break;
    case OPT_RESPONSE:
        o->response_bytes = (int64_t)decimal(optarg, 1e12);
        break;
    case OPT_BODY:
        o->body_bytes = (size_t)decimal(optarg, 1e9);
        break;
    case OPT_MODEL:
        o->models = optarg;
        break;
    case OPT_TENANTS:
        o->tenants = (unsigned)decimal(optarg, REQUESTS_MAX);
        break;
    case OPT_HEADER:
        o->headers[o->header_count++] = optarg;
        break;
    case OPT_ABORT:
        o->abort_rate = decimal(optarg, 1);
        break;
    case OPT_THINK:
        o->think_ns = (uint64_t)decimal(optarg, 3.6e6) * NS_PER_MS;
        break;
    case OPT_TIMEOUT:
        o->timeout_ns = (uint64_t)decimal(optarg, 3.6e6) * NS_PER_MS;
        break;
    case OPT_DRAIN:
        o->drain_ns = (uint64_t)decimal(optarg, 3.6e6) * NS_PER_MS;
        break;
    case OPT_UNIX:
        o->unix_path = optarg;
        break;
    case OPT_PIN:
        o->pin_cpu = (int)decimal(optarg, CPU_SETSIZE - 1);
        break;
    case OPT_SEED:
        o->seed = (unsigned)decimal(optarg, 4294967295.0);
        break;
    case OPT_JSON:
        o->json = true;
        break;
    case OPT_QUIET:
        o->quiet = true;
        break;
    case OPT_HELP:
        usage(0);
    default:
        usage(2);
    }
}

static void parse_options(int argc, char **argv, struct options *o)
{
    static const struct option longs[] = {
        {"url", required_argument, NULL, OPT_URL},
        {"concurrency", required_argument, NULL, OPT_CONCURRENCY},
        {"duration", required_argument, NULL, OPT_DURATION},
        {"requests", required_argument, NULL, OPT_REQUESTS},
        {"rate", required_argument, NULL, OPT_RATE},
        {"stream", no_argument, NULL, OPT_STREAM},
        {"events", required_argument, NULL, OPT_EVENTS},
        {"delay-ms", required_argument, NULL, OPT_DELAY},
        {"ttft-ms", required_argument, NULL, OPT_TTFT},
        {"response-bytes", required_argument, NULL, OPT_RESPONSE},
        {"body-bytes", required_argument, NULL, OPT_BODY},
        {"model", required_argument, NULL, OPT_MODEL},
        {"tenants", required_argument, NULL, OPT_TENANTS},
        {"header", required_argument, NULL, OPT_HEADER},
        {"abort-rate", required_argument, NULL, OPT_ABORT},
        {"think-ms", required_argument, NULL, OPT_THINK},
        {"timeout-ms", required_argument, NULL, OPT_TIMEOUT},
        {"drain-ms", required_argument, NULL, OPT_DRAIN},
        {"unix", required_argument, NULL, OPT_UNIX},
        {"pin", required_argument, NULL, OPT_PIN},
        {"seed", required_argument, NULL, OPT_SEED},
        {"json", no_argument, NULL, OPT_JSON},
        {"quiet", no_argument, NULL, OPT_QUIET},
        {"help", no_argument, NULL, OPT_HELP},
        {NULL, 0, NULL, 0},
    };
    int opt;

    o->headers = calloc((size_t)argc, sizeof(*o->headers));
    BUG_ON(o->headers == NULL);
    while ((opt = getopt_long(argc, argv, "", longs, NULL)) != -1)
        set_option(o, opt);
    if (optind < argc || o->url == NULL || o->concurrency == 0)
        usage(2);
    parse_url(o);
}

/* ---- requests, made once ---- */

static void resolve(struct load *l)
{
    const struct options *o = &l->options;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    struct sockaddr_un *un = (struct sockaddr_un *)&l->address;
    char host[sizeof(o->host)], port[8];
    int rc;

    if (o->unix_path != NULL) {
        if (strlen(o->unix_path) >= sizeof(un->sun_path))
            fail(o->unix_path, "too long");
        un->sun_family = AF_UNIX;
        memcpy(un->sun_path, o->unix_path, strlen(o->unix_path) + 1);
        l->address_n = sizeof(*un);
        return;
    }
    memcpy(host, o->host, sizeof(host));
    if (strrchr(host, ':') != NULL)
        *strrchr(host, ':') = '\0';
    snprintf(port, sizeof(port), "%u", o->port);
    rc = getaddrinfo(host, port, &hints, &found);
    if (rc != 0)
        fail(host, gai_strerror(rc));
    memcpy(&l->address, found->ai_addr, found->ai_addrlen);
    l->address_n = found->ai_addrlen;
    freeaddrinfo(found);
}

/* A body of at least o->body_bytes in the shape of the chat APIs; the model stands first. */
static char *make_body(const struct options *o, struct slice model, size_t *n)
{
    static const char tail[] = "\"}]}";
    char head[512];
    int head_n = snprintf(head, sizeof(head),
                          "{\"model\":\"%.*s\",\"stream\":%s,\"max_tokens\":256,\"messages\":["
                          "{\"role\":\"user\",\"content\":\"",
                          (int)size_min(model.n, 256), model.p, o->stream ? "true" : "false");
    size_t fixed = (size_t)head_n + sizeof(tail) - 1,
           fill = o->body_bytes > fixed ? o->body_bytes - fixed : 0;
    char *body = malloc(fixed + fill + 1);

    BUG_ON(body == NULL || head_n < 0);
    memcpy(body, head, (size_t)head_n);
    for (size_t i = 0; i < fill; i++)
        body[(size_t)head_n + i] = "count these words "[i % 18];
    memcpy(body + (size_t)head_n + fill, tail, sizeof(tail));
    *n = fixed + fill;
    return body;
}

static void add_wish(FILE *f, const char *name, int64_t value)
{
    if (value >= 0)
        fprintf(f, "%s: %lld\r\n", name, (long long)value);
}

static void make_request(struct load *l, struct request *q, const char *body, size_t body_n, unsigned tenant)
{
    const struct options *o = &l->options;
    FILE *f = open_memstream(&q->head, &q->head_n);

    BUG_ON(f == NULL);
    fprintf(f, "%s %s HTTP/1.1\r\nHost: %s\r\n", o->body_bytes > 0 ? "POST" : "GET", o->path, o->host);
    add_wish(f, "x-mock-events", o->events);
    add_wish(f, "x-mock-delay-ms", o->delay_ms);
    add_wish(f, "x-mock-ttft-ms", o->ttft_ms);
    add_wish(f, "x-mock-bytes", o->response_bytes);
    if (o->tenants > 0)
        fprintf(f, "x-tenant-id: t%u\r\n", tenant);
    for (size_t i = 0; i < o->header_count; i++)
        fprintf(f, "%s\r\n", o->headers[i]);
    if (o->body_bytes > 0)
        fprintf(f, "Content-Type: application/json\r\nContent-Length: %zu\r\n", body_n);
    fprintf(f, "\r\n");
    fclose(f);
    q->body = body;
    q->body_n = o->body_bytes > 0 ? body_n : 0;
    if (q->body_n > 0 && q->body_n <= 4096) { /* one piece for one send */
        q->head = realloc(q->head, q->head_n + body_n);
        BUG_ON(q->head == NULL);
        memcpy(q->head + q->head_n, body, body_n);
        q->head_n += body_n;
        q->body_n = 0;
    }
}

static void make_requests(struct load *l)
{
    const struct options *o = &l->options;
    unsigned tenants = o->tenants > 0 ? o->tenants : 1;
    size_t models = 1, at = 0;
    const char *p = o->models;

    for (const char *c = p; *c != '\0'; c++)
        models += *c == ',';
    l->request_count = models * tenants;
    if (l->request_count > REQUESTS_MAX)
        fail("--model, --tenants", "too many combinations");
    l->requests = calloc(l->request_count, sizeof(*l->requests));
    BUG_ON(l->requests == NULL);
    for (size_t m = 0; m < models; m++) {
        struct slice model = {p, strcspn(p, ",")};
        size_t body_n;
        char *body = make_body(o, model, &body_n);

        for (unsigned t = 0; t < tenants; t++)
            make_request(l, &l->requests[at++], body, body_n, t);
        if (body_n <= 4096)
            free(body); /* copied; larger ones are shared, and live as long as the process */
        p += model.n + (p[model.n] == ',');
    }
}

/* ---- when calls begin ---- */

static bool may_begin(const struct load *l)
{
    return !l->stopping && (l->options.requests == 0 || l->results.started < l->options.requests);
}

static void next_call(struct slot *s)
{
    struct load *l = s->load;

    if (l->options.rate <= 0) {
        if (may_begin(l))
            slot_begin(s, l->now_ns);
    } else if (backlog.n > 0 && may_begin(l)) {
        uint64_t due_ns = backlog.due_ns[backlog.first];

        backlog.first = (backlog.first + 1) % BACKLOG_MAX;
        backlog.n--;
        slot_begin(s, due_ns);
    } else {
        list_push_back(&l->idle, &s->idle_node);
    }
}

void load_slot_free(struct slot *s, bool after_error)
{
    uint64_t pause_ns = after_error ? ERROR_PAUSE_MS * NS_PER_MS : s->load->options.think_ns;

    if (pause_ns > 0)
        timers_arm(&s->load->timers, &s->pause, s->load->now_ns + pause_ns);
    else
        next_call(s);
}

static void arrive(struct load *l, uint64_t due_ns)
{
    struct list_node *n = list_pop_front(&l->idle);

    if (n != NULL) {
        slot_begin(container_of(n, struct slot, idle_node), due_ns);
        return;
    }
    l->results.late_arrivals++;
    if (backlog.n < BACKLOG_MAX)
        backlog.due_ns[(backlog.first + backlog.n++) % BACKLOG_MAX] = due_ns;
}

static void run_timers(struct load *l)
{
    struct timer *t;

    while ((t = timers_take_due(&l->timers, l->now_ns)) != NULL) {
        if (t->kind == 0)
            next_call(container_of(t, struct slot, pause));
        else
            slot_on_limit(container_of(t, struct slot, limit));
    }
}

static void turn(struct load *l, uint64_t until_ns)
{
    struct epoll_event evs[BATCH];
    uint64_t wait_ns = timers_wait_ns(&l->timers, l->now_ns, until_ns > l->now_ns ? until_ns - l->now_ns : 0);
    struct timespec timeout = {(time_t)(wait_ns / 1000000000u), (long)(wait_ns % 1000000000u)};
    int n = epoll_pwait2(l->epoll_fd, evs, BATCH, &timeout, NULL);

    l->now_ns = clock_ns();
    for (int i = 0; i < n; i++)
        slot_on_events(evs[i].data.ptr, evs[i].events);
    run_timers(l);
}

static void run(struct load *l)
{
    const struct options *o = &l->options;
    struct results before = l->results;
    uint64_t start_ns = l->now_ns = clock_ns(), end_ns = start_ns + o->duration_ns, report_ns = start_ns,
             arrival_ns = start_ns;

    l->results.start_ns = start_ns;
    for (unsigned i = 0; i < o->concurrency; i++)
        next_call(&l->slots[i]);
    while (!interrupted && l->now_ns < end_ns && (may_begin(l) || l->in_flight > 0)) {
        uint64_t until_ns = report_ns + 1000000000u < end_ns ? report_ns + 1000000000u : end_ns;

        while (o->rate > 0 && arrival_ns <= l->now_ns && may_begin(l)) {
            arrive(l, arrival_ns);
            arrival_ns += (uint64_t)(-log(1 - load_uniform(l)) / o->rate * 1e9) + 1;
        }
        if (o->rate > 0 && may_begin(l) && arrival_ns < until_ns)
            until_ns = arrival_ns;
        turn(l, until_ns);
        if (l->now_ns >= report_ns + 1000000000u) {
            if (!o->quiet)
                results_progress(&l->results, &before, (double)(l->now_ns - report_ns) / 1e9, l->in_flight);
            before = l->results;
            report_ns = l->now_ns;
        }
    }
    l->results.end_ns = l->now_ns;
    l->stopping = true;
    end_ns = l->now_ns + o->drain_ns;
    while (l->in_flight > 0 && l->now_ns < end_ns && interrupted < 2)
        turn(l, end_ns);
    l->results.unfinished = l->in_flight;
}

static void set_up(struct load *l)
{
    const struct options *o = &l->options;
    struct rlimit limit;
    cpu_set_t cpus;

    if (o->pin_cpu >= 0) {
        CPU_ZERO(&cpus);
        CPU_SET((size_t)o->pin_cpu, &cpus);
        if (sched_setaffinity(0, sizeof(cpus), &cpus) != 0)
            fail("--pin", strerror(errno));
    }
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    resolve(l);
    make_requests(l);
    list_init(&l->idle);
    l->random = o->seed;
    l->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    l->slots = calloc(o->concurrency, sizeof(*l->slots));
    l->read_buffer = malloc(LOAD_READ_SIZE);
    BUG_ON(l->epoll_fd < 0 || l->slots == NULL || l->read_buffer == NULL);
    for (unsigned i = 0; i < o->concurrency; i++) {
        l->slots[i].load = l;
        l->slots[i].fd = -1;
        l->slots[i].limit.kind = 1;
    }
}

static void tear_down(struct load *l)
{
    for (unsigned i = 0; i < l->options.concurrency; i++)
        slot_drop(&l->slots[i]);
    for (size_t i = 0; i < l->request_count; i++)
        free(l->requests[i].head);
    timers_free(&l->timers);
    free(l->requests);
    free(l->slots);
    free(l->read_buffer);
    free(l->options.headers);
    close(l->epoll_fd);
    free(l);
}

int main(int argc, char **argv)
{
    struct load *l = calloc(1, sizeof(*l));
    struct sigaction act = {.sa_handler = on_signal};
    int status;

    BUG_ON(l == NULL);
    l->options = (struct options){.models = "gpt-4o",
                                  .concurrency = 64,
                                  .duration_ns = 10000000000u,
                                  .seed = 1,
                                  .drain_ns = 5000 * NS_PER_MS,
                                  .timeout_ns = 120000 * NS_PER_MS,
                                  .body_bytes = 160,
                                  .events = -1,
                                  .delay_ms = -1,
                                  .ttft_ms = -1,
                                  .response_bytes = -1,
                                  .pin_cpu = -1};
    parse_options(argc, argv, &l->options);
    sigaction(SIGINT, &act, NULL);
    sigaction(SIGTERM, &act, NULL);
    signal(SIGPIPE, SIG_IGN);
    set_up(l);
    run(l);
    if (l->options.json)
        results_print_json(&l->results, &l->options);
    else
        results_print(&l->results, &l->options);
    status = l->results.connects == 0 ? 1 : 0;
    if (status != 0)
        fprintf(stderr, "loadgen: no connection to %s\n", l->options.url);
    tear_down(l);
    return status;
}
