/* The streams of a device while they play a step, compiled: what streams_in_python.py does, number
   by number.
*/

#define PY_SSIZE_T_CLEAN
#include "arrays.h"
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { COMPUTE, SEND, WAIT, PHASE, MARK, REPEAT, FINISH };
enum { ALONE = -1, NONE = -1, REMEMBERED = 64, PHASES = 3 };
static const double SAME = 1e-12;

/* The arrays in the order of the named tuples of streams_in_python.py. */
enum { OPS, NUMBERS, SECONDS, GROUP, USES_AT, LINK, SHARE, STARTS, ENDS, LAST, SUMS, ARRAYS };
static const char formats[ARRAYS + 1] = "qqdqqqdddqd";
static const Py_ssize_t parts[] = {3, 4, 4};

typedef struct {
    double start, end, after, work, left, saved;
    int64_t stream, index, next;
} Sent;

/* The queue of a stream on shared links: its transfers from `head` on are not over. */
typedef struct {
    int64_t head, tail, saved;
} Queue;

/* Links that several streams share: these in the order in which they first sent. */
typedef struct {
    double time;
    int64_t *streams;
    int64_t count;
} Group;

typedef struct {
    void *at[ARRAYS];
    Py_ssize_t length[ARRAYS];
    double slowdown, now, slowed, spent[PHASES], mark[2 + PHASES];
    int64_t phase;
    Sent *sent;
    int64_t count;
    int64_t *under_way;
    int64_t flying;
    double *free_at;
    Queue *queues;
    Group *groups;
    int64_t group_count, link_count;
    double *loads, *slower, *left_ends;
    int64_t *streams;
} Player;

#define INTS(array) ((int64_t *)p->at[array])
#define DOUBLES(array) ((double *)p->at[array])

static void note(Player *p, int64_t index, double start, double end)
{
    DOUBLES(STARTS)[index] = start;
    DOUBLES(ENDS)[index] = end;
}

/* --- shared links --- */

/* How many times longer the first transfer of each stream takes beside the others. */
static void slower(Player *p, const Group *g)
{
    const int64_t *at = INTS(USES_AT), *link = INTS(LINK);
    for (int64_t i = 0; i < g->count; i++)
        if (p->queues[g->streams[i]].head != NONE)
            for (int64_t k = at[g->streams[i]]; k < at[g->streams[i] + 1]; k++)
                p->loads[link[k]] = 0.0;
    for (int64_t i = 0; i < g->count; i++)
        if (p->queues[g->streams[i]].head != NONE)
            for (int64_t k = at[g->streams[i]]; k < at[g->streams[i] + 1]; k++)
                p->loads[link[k]] += DOUBLES(SHARE)[k];
    for (int64_t i = 0; i < g->count; i++) {
        p->slower[i] = 1.0;
        for (int64_t k = at[g->streams[i]]; k < at[g->streams[i] + 1]; k++)
            if (p->loads[link[k]] > p->slower[i])
                p->slower[i] = p->loads[link[k]];
    }
}

static int is_busy(const Player *p, const Group *g)
{
    for (int64_t i = 0; i < g->count; i++)
        if (p->queues[g->streams[i]].head != NONE)
            return 1;
    return 0;
}

/* Let the transfers of a group go on until then. */
static void advance(Player *p, Group *g, double until)
{
    while (g->time < until && is_busy(p, g)) {
        slower(p, g);
        double step = until - g->time;
        for (int64_t i = 0; i < g->count; i++) {
            const int64_t head = p->queues[g->streams[i]].head;
            if (head == NONE)
                continue;
            p->left_ends[i] = p->sent[head].left * p->slower[i];
            if (p->left_ends[i] < step)
                step = p->left_ends[i];
        }
        for (int64_t i = 0; i < g->count; i++) {
            Queue *queue = &p->queues[g->streams[i]];
            if (queue->head == NONE)
                continue;
            Sent *one = &p->sent[queue->head];
            if (one->left == one->work)
                one->start = g->time;
            one->left -= step / p->slower[i];
            /* Rounding may leave a little of a transfer that is over. */
            if (p->left_ends[i] == step || one->left <= SAME * one->work) {
                one->end = g->time + step;
                queue->head = one->next;
            }
        }
        g->time += step;
    }
    if (until < INFINITY && until > g->time)
        g->time = until;
}

#define EACH_WAITING(g, one)                                                                       \
    for (int64_t s_ = 0; s_ < (g)->count; s_++)                                                    \
        for (int64_t one = p->queues[(g)->streams[s_]].head; one != NONE; one = p->sent[one].next)

/* Put a transfer on the links of its stream, and update start and end of all unfinished ones. */
static void share(Player *p, Group *g, int64_t number)
{
    advance(p, g, p->now);
    Sent *sent = &p->sent[number];
    Queue *queue = &p->queues[sent->stream];
    /* A stream that has never sent has no tail yet. */
    if (queue->tail == NONE)
        g->streams[g->count++] = sent->stream;
    else
        p->sent[queue->tail].next = number;
    queue->tail = number;
    if (queue->head == NONE)
        queue->head = number;
    /* The links are played to the end to know starts and ends, and put back to the present. */
    const double time = g->time;
    EACH_WAITING(g, one)
        p->sent[one].saved = p->sent[one].left;
    for (int64_t i = 0; i < g->count; i++)
        p->queues[g->streams[i]].saved = p->queues[g->streams[i]].head;
    advance(p, g, INFINITY);
    g->time = time;
    for (int64_t i = 0; i < g->count; i++)
        p->queues[g->streams[i]].head = p->queues[g->streams[i]].saved;
    EACH_WAITING(g, one) {
        Sent *it = &p->sent[one];
        it->left = it->saved;
        p->free_at[it->stream] = it->end;
        note(p, it->index, it->start, it->end);
    }
}

/* --- operations --- */

/* The end of seconds of work from a start, slowed down while something is sent. */
static double slowed_end(const Player *p, double start, double seconds)
{
    for (int64_t i = 0; i < p->flying; i++) {
        const Sent *sent = &p->sent[p->under_way[i]];
        if (sent->start - start >= seconds)
            break;
        if (sent->start > start) {
            seconds -= sent->start - start;
            start = sent->start;
        }
        if (sent->end > start) {
            const double done = (sent->end - start) / p->slowdown;
            if (done >= seconds)
                return start + seconds * p->slowdown;
            seconds -= done;
            start = sent->end;
        }
    }
    return start + seconds;
}

/* Sort what is under way by its start; what starts together stays in its order. */
static void sort(Player *p)
{
    for (int64_t i = 1; i < p->flying; i++) {
        const int64_t one = p->under_way[i];
        int64_t k = i;
        for (; k && p->sent[p->under_way[k - 1]].start > p->sent[one].start; k--)
            p->under_way[k] = p->under_way[k - 1];
        p->under_way[k] = one;
    }
}

static void forget(Player *p, double time)
{
    int64_t left = 0;
    for (int64_t i = 0; i < p->flying; i++)
        if (p->sent[p->under_way[i]].end > time)
            p->under_way[left++] = p->under_way[i];
    p->flying = left;
}

static void compute(Player *p, int64_t index)
{
    const double seconds = DOUBLES(SECONDS)[index], start = p->now;
    if (p->flying && p->slowdown != 1.0) {
        sort(p);
        p->now = slowed_end(p, start, seconds);
        forget(p, start);
    } else
        p->now = start + seconds;
    p->spent[p->phase] += seconds;
    p->slowed += p->now - start - seconds;
    note(p, index, start, p->now);
}

static void send(Player *p, int64_t index, int64_t stream)
{
    const int64_t number = p->count++;
    Sent *sent = &p->sent[number];
    sent->start = p->free_at[stream] > p->now ? p->free_at[stream] : p->now;
    sent->end = sent->start + DOUBLES(SECONDS)[index];
    sent->after = p->now;
    sent->work = sent->left = sent->end - sent->start;
    sent->stream = stream;
    sent->index = index;
    sent->next = NONE;
    p->free_at[stream] = sent->end;
    note(p, index, sent->start, sent->end);
    if (INTS(GROUP)[stream] != ALONE)
        share(p, &p->groups[INTS(GROUP)[stream]], number);
    p->under_way[p->flying++] = number;
    if (p->flying > REMEMBERED)
        forget(p, p->now);
}

static int wait(Player *p, int64_t number, int64_t index)
{
    const Sent *sent = &p->sent[number];
    const double seconds = sent->end - p->now;
    if (seconds <= 0)
        return 0;
    const double late = sent->end - sent->after - sent->work;
    note(p, index, seconds, late < seconds ? late : seconds);
    p->now = sent->end;
    return 1;
}

static void shift(Sent *sent, double seconds)
{
    sent->start += seconds;
    sent->end += seconds;
    sent->after += seconds;
}

static void repeat(Player *p, double times)
{
    const double seconds = times * (p->now - p->mark[0]);
    p->now += seconds;
    for (Py_ssize_t stream = 0; stream < p->length[GROUP]; stream++)
        p->free_at[stream] += seconds;
    for (int64_t i = 0; i < p->flying; i++)
        if (INTS(GROUP)[p->sent[p->under_way[i]].stream] == ALONE)
            shift(&p->sent[p->under_way[i]], seconds);
    for (int64_t group = 0; group < p->group_count; group++) {
        p->groups[group].time += seconds;
        EACH_WAITING(&p->groups[group], one)
            shift(&p->sent[one], seconds);
    }
    p->slowed += times * (p->slowed - p->mark[1]);
    for (int phase = 0; phase < PHASES; phase++)
        p->spent[phase] += times * (p->spent[phase] - p->mark[2 + phase]);
}

static void finish(Player *p)
{
    int64_t count = 0;
    for (int64_t i = 0; i < p->flying; i++)
        if (wait(p, p->under_way[i], p->length[OPS] + count))
            INTS(LAST)[count++] = p->under_way[i];
    INTS(LAST)[count] = NONE;
}

/* Play all operations; a text says what is wrong with the score. */
static const char *play(Player *p)
{
    for (Py_ssize_t index = 0; index < p->length[OPS]; index++) {
        const int64_t number = INTS(NUMBERS)[index];
        switch (INTS(OPS)[index]) {
        case COMPUTE:
            compute(p, index);
            break;
        case SEND:
            if (number < 0 || number >= p->length[GROUP] || p->count >= p->length[LAST] - 1)
                return "a transfer has no stream";
            send(p, index, number);
            break;
        case WAIT:
            if (number <= 0 || number > p->count)
                return "a transfer is waited for that was not sent";
            wait(p, p->count - number, index);
            break;
        case PHASE:
            if (number < 0 || number >= PHASES)
                return "a phase is not known";
            p->phase = number;
            break;
        case MARK:
            p->mark[0] = p->now;
            p->mark[1] = p->slowed;
            memcpy(p->mark + 2, p->spent, sizeof p->spent);
            break;
        case REPEAT:
            repeat(p, (double)number);
            break;
        case FINISH:
            finish(p);
            break;
        default:
            return "an operation is not known";
        }
    }
    DOUBLES(SUMS)[0] = p->now;
    DOUBLES(SUMS)[1] = p->slowed;
    memcpy(DOUBLES(SUMS) + 2, p->spent, sizeof p->spent);
    return NULL;
}

/* --- memory and arguments --- */

/* Whether all arrays are as long as they say of one another. */
static int is_whole(Player *p)
{
    const Py_ssize_t ops = p->length[OPS], streams = p->length[GROUP];
    const Py_ssize_t sends = p->length[LAST] - 1;
    if (p->length[NUMBERS] != ops || p->length[SECONDS] != ops || p->length[SUMS] != 2 + PHASES
        || p->length[USES_AT] != streams + 1 || p->length[LINK] != p->length[SHARE] || sends < 0
        || p->length[STARTS] < ops + sends || p->length[ENDS] < ops + sends
        || INTS(USES_AT)[0] < 0 || INTS(USES_AT)[streams] > p->length[LINK])
        return 0;
    for (Py_ssize_t s = 0; s < streams; s++) {
        const int64_t group = INTS(GROUP)[s];
        if (group < ALONE || group >= streams || INTS(USES_AT)[s] > INTS(USES_AT)[s + 1])
            return 0;
        if (group >= p->group_count)
            p->group_count = group + 1;
    }
    for (Py_ssize_t k = 0; k < p->length[LINK]; k++) {
        if (INTS(LINK)[k] < 0 || INTS(LINK)[k] >= p->length[LINK])
            return 0;
        if (INTS(LINK)[k] >= p->link_count)
            p->link_count = INTS(LINK)[k] + 1;
    }
    return 1;
}

static int take_room(Player *p)
{
    const size_t streams = (size_t)p->length[GROUP] + 1, sends = (size_t)p->length[LAST];
    const size_t groups = (size_t)p->group_count;
    p->sent = calloc(sends, sizeof *p->sent);
    p->under_way = calloc(sends, sizeof *p->under_way);
    p->free_at = calloc(streams, sizeof *p->free_at);
    p->queues = calloc(streams, sizeof *p->queues);
    p->groups = calloc(groups + 1, sizeof *p->groups);
    p->streams = calloc((groups + 1) * streams, sizeof *p->streams);
    p->loads = calloc((size_t)p->link_count + 1, sizeof *p->loads);
    p->slower = calloc(streams, sizeof *p->slower);
    p->left_ends = calloc(streams, sizeof *p->left_ends);
    if (!p->sent || !p->under_way || !p->free_at || !p->queues || !p->groups || !p->streams
        || !p->loads || !p->slower || !p->left_ends)
        return 0;
    for (size_t s = 0; s < streams; s++)
        p->queues[s].head = p->queues[s].tail = NONE;
    for (size_t g = 0; g < groups; g++)
        p->groups[g].streams = p->streams + g * streams;
    return 1;
}

static void give_room_back(Player *p)
{
    free(p->sent);
    free(p->under_way);
    free(p->free_at);
    free(p->queues);
    free(p->groups);
    free(p->streams);
    free(p->loads);
    free(p->slower);
    free(p->left_ends);
}

PyObject *autopar_play(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *tuples[3];
    Player player;
    memset(&player, 0, sizeof player);
    Player *p = &player;
    if (!PyArg_ParseTuple(args, "O!O!dO!", &PyTuple_Type, &tuples[0], &PyTuple_Type, &tuples[1],
                          &p->slowdown, &PyTuple_Type, &tuples[2]))
        return NULL;
    Py_buffer views[ARRAYS];
    int opened = 0, failed = 0;
    for (int t = 0; t < 3 && !failed; t++) {
        if (PyTuple_Size(tuples[t]) != parts[t]) {
            PyErr_SetString(PyExc_ValueError, "a score has 3, 4 and 4 arrays");
            failed = 1;
        }
        for (Py_ssize_t i = 0; i < parts[t] && !failed; i++) {
            failed = open_array(PyTuple_GetItem(tuples[t], i), &views[opened], formats[opened],
                                "a score", formats);
            if (!failed) {
                p->at[opened] = views[opened].buf;
                p->length[opened] = views[opened].len / 8;
                opened++;
            }
        }
    }
    if (!failed && !is_whole(p)) {
        PyErr_SetString(PyExc_ValueError, "the arrays of a score do not belong together");
        failed = 1;
    }
    if (!failed && !take_room(p)) {
        PyErr_NoMemory();
        failed = 1;
    }
    if (!failed) {
        const char *wrong = play(p);
        if (wrong) {
            PyErr_SetString(PyExc_ValueError, wrong);
            failed = 1;
        }
    }
    give_room_back(p);
    while (opened)
        PyBuffer_Release(&views[--opened]);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}
