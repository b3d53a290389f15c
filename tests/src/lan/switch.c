/* The switch of the LAN lab: one Ethernet port per network namespace, each with its own line rate,
 * delay and loss, changed while frames flow.
 *
 *   switch NAMESPACE...
 *
 * Makes the device `eth0` in every namespace (paths such as /run/netns/NAME), prints "ready" and then
 * obeys one command a line on stdin; ports count from 0:
 *
 *   rate PORT MBIT     line rate of the cable, both directions; 0 = unlimited
 *   delay PORT US      one-way delay of the cable; a frame from i to j takes delay i + delay j
 *   loss PORT PPM      frames lost on the cable, in each direction
 *   link PORT 0|1      cable pulled or plugged: the host's carrier goes with it
 *   stats              one line per port: frames and wire bytes from the host, to the host, dropped
 *
 * Every command is answered by its lines and then "ok", or by "error ...". The switch ends with its
 * stdin, and the devices end with the switch.
 *
 * How time is counted. A cable carries one frame at a time in each direction. A frame occupies its
 * sender's cable from the moment it is free, for its bytes on the wire over the rate; the switch passes
 * on whole frames, so its first one can occupy the receiver's cable as soon as it has arrived. The
 * kernel hands over up to 64 KiB of one connection at once: they count as the train of frames they
 * would be on a wire, and are delivered when the last one would have arrived. While a port loses
 * frames, no port takes such trains, so that every frame is lost or spared on its own.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum {
    PORTS = 64,
    VNET = sizeof(struct virtio_net_hdr),
    LONGEST = VNET + 14 + 65536,
    ON_WIRE = 24,    /* preamble, checksum and gap around every frame */
    WHOLE = 1514 + ON_WIRE,
    AT_ONCE = 32,    /* frames taken from one port before the others' turn */
};

#define SECOND 1000000000ull
/* A cable's queue holds a tenth of a second within these bounds, in bytes. */
#define QUEUE_MIN (256.0 * 1024)
#define QUEUE_MAX (2048.0 * 1024)

/* One direction of a cable. */
struct lane {
    uint64_t free_at;
    uint64_t frames, bytes, dropped;
};

struct port {
    int fd;
    int plugged;
    double mbit;
    uint64_t delay_ns;
    uint32_t loss_ppm;
    uint64_t last_due;
    struct lane from, to;
};

/* A frame on its way, in a heap by the time it is due. */
struct flight {
    uint64_t due, number;
    int to;
    uint32_t len;
    unsigned char *bytes;
};

static struct port ports[PORTS];
static int count;
static struct flight *heap;
static size_t in_heap, heap_room;
static uint64_t flights;

static void fail(const char *what, const char *which)
{
    fprintf(stderr, "switch: %s %s: %s\n", what, which, strerror(errno));
    exit(1);
}

static uint64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

static int chance(uint32_t ppm)
{
    static uint64_t state = 0x9e3779b97f4a7c15ull;
    if (!ppm)
        return 0;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state >> 11) % 1000000 < ppm;
}

static int earlier(const struct flight *a, const struct flight *b)
{
    return a->due != b->due ? a->due < b->due : a->number < b->number;
}

static void push(struct flight flight)
{
    if (in_heap == heap_room) {
        heap_room = heap_room ? 2 * heap_room : 1024;
        heap = realloc(heap, heap_room * sizeof *heap);
        if (!heap)
            fail("out of", "memory");
    }
    size_t at = in_heap++;
    for (; at && earlier(&flight, &heap[(at - 1) / 2]); at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = flight;
}

static struct flight pop(void)
{
    struct flight first = heap[0], last = heap[--in_heap];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < in_heap; at = child) {
        if (child + 1 < in_heap && earlier(&heap[child + 1], &heap[child]))
            child++;
        if (!earlier(&heap[child], &last))
            break;
        heap[at] = heap[child];
    }
    if (in_heap)
        heap[at] = last;
    return first;
}

/* Nanoseconds that `bytes` take on the cable of `port`. */
static uint64_t on_cable(const struct port *port, uint64_t bytes)
{
    return port->mbit > 0 ? (uint64_t)((double)bytes * 8000.0 / port->mbit) : 0;
}

static int queue_full(const struct port *port, uint64_t start, uint64_t now)
{
    double most = port->mbit * 1e6 / 8 / 10;
    if (most < QUEUE_MIN)
        most = QUEUE_MIN;
    if (most > QUEUE_MAX)
        most = QUEUE_MAX;
    return port->mbit > 0 && start > now && (double)(start - now) * port->mbit / 8000.0 > most;
}

/* Bytes and frames that what the kernel handed over would be on a wire. */
static uint64_t wire_size(const unsigned char *bytes, size_t len, uint64_t *frames)
{
    struct virtio_net_hdr header;
    size_t frame = len - VNET;
    memcpy(&header, bytes, sizeof header);
    *frames = 1;
    if (header.gso_type != VIRTIO_NET_HDR_GSO_NONE && header.gso_size && header.hdr_len < frame)
        *frames = (frame - header.hdr_len + header.gso_size - 1) / header.gso_size;
    size_t head = *frames > 1 ? header.hdr_len : 0;
    size_t wire = frame + (*frames - 1) * head + *frames * ON_WIRE;
    /* The shortest frame on Ethernet has 60 bytes before its checksum. */
    return wire < 60 + ON_WIRE ? 60 + ON_WIRE : wire;
}

struct parcel {
    const unsigned char *bytes;
    size_t len;
    uint64_t wire, frames;
    uint64_t start, end;    /* on the sender's cable */
};

static void forward(int from, int to, const struct parcel *parcel, uint64_t now)
{
    struct port *source = &ports[from], *target = &ports[to];
    uint64_t one = parcel->wire < WHOLE ? parcel->wire : WHOLE;
    uint64_t start = parcel->start + on_cable(source, one);
    if (start < target->to.free_at)
        start = target->to.free_at;
    if (!target->plugged || chance(target->loss_ppm) || queue_full(target, start, now)) {
        target->to.dropped += parcel->frames;
        return;
    }
    uint64_t end = start + on_cable(target, parcel->wire);
    uint64_t after_last = parcel->end + on_cable(target, one);
    if (end < after_last)
        end = after_last;
    target->to.free_at = end;
    uint64_t due = end + source->delay_ns + target->delay_ns;
    if (due < target->last_due)
        due = target->last_due;
    target->last_due = due;
    target->to.frames += parcel->frames;
    target->to.bytes += parcel->wire;

    unsigned char *copy = malloc(parcel->len);
    if (!copy)
        fail("out of", "memory");
    memcpy(copy, parcel->bytes, parcel->len);
    push((struct flight){ due, flights++, to, (uint32_t)parcel->len, copy });
}

/* The lab gives port i the address 02:53:48:00:00:(i + 1); whatever else is flooded. */
static int owner(const unsigned char *mac)
{
    static const unsigned char ours[5] = { 0x02, 0x53, 0x48, 0, 0 };
    return memcmp(mac, ours, sizeof ours) == 0 && mac[5] >= 1 && mac[5] <= count ? mac[5] - 1 : -1;
}

static void receive(int from)
{
    static unsigned char bytes[LONGEST];
    struct port *source = &ports[from];
    for (int i = 0; i < AT_ONCE; i++) {
        ssize_t len = read(source->fd, bytes, sizeof bytes);
        if (len < VNET + 14)
            return;
        uint64_t now = clock_ns();
        struct parcel parcel = { .bytes = bytes, .len = (size_t)len };
        parcel.wire = wire_size(bytes, parcel.len, &parcel.frames);
        parcel.start = source->from.free_at > now ? source->from.free_at : now;
        if (!source->plugged || queue_full(source, parcel.start, now)) {
            source->from.dropped += parcel.frames;
            continue;
        }
        parcel.end = parcel.start + on_cable(source, parcel.wire);
        source->from.free_at = parcel.end;
        source->from.frames += parcel.frames;
        source->from.bytes += parcel.wire;
        if (chance(source->loss_ppm)) {
            source->from.dropped += parcel.frames;
            continue;
        }
        int to = owner(bytes + VNET);
        for (int port = 0; port < count; port++)
            if (port != from && (to < 0 || port == to))
                forward(from, port, &parcel, now);
    }
}

/* Delivers what is due; returns when the next frame is, or 0. */
static uint64_t deliver(void)
{
    while (in_heap) {
        if (heap[0].due > clock_ns())
            return heap[0].due;
        struct flight flight = pop();
        struct port *target = &ports[flight.to];
        if (!target->plugged || write(target->fd, flight.bytes, flight.len) < 0)
            target->to.dropped++;
        free(flight.bytes);
    }
    return 0;
}

static void choose_offloads(void)
{
    unsigned trains = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6;
    for (int i = 0; i < count; i++)
        if (ports[i].loss_ppm)
            trains = TUN_F_CSUM;
    for (int i = 0; i < count; i++)
        if (ioctl(ports[i].fd, TUNSETOFFLOAD, trains) < 0)
            fail("TUNSETOFFLOAD", "eth0");
}

static void print_stats(void)
{
    for (int i = 0; i < count; i++) {
        const struct lane *from = &ports[i].from, *to = &ports[i].to;
        printf("%llu %llu %llu %llu %llu %llu\n", (unsigned long long)from->frames,
               (unsigned long long)from->bytes, (unsigned long long)from->dropped,
               (unsigned long long)to->frames, (unsigned long long)to->bytes,
               (unsigned long long)to->dropped);
    }
}

static void obey(const char *line)
{
    char verb[8];
    int number;
    double value;
    int fields = sscanf(line, "%7s %d %lf", verb, &number, &value);
    if (fields == 1 && strcmp(verb, "stats") == 0) {
        print_stats();
        puts("ok");
        return;
    }
    if (fields != 3 || number < 0 || number >= count || value < 0) {
        printf("error: not a command: %s\n", line);
        return;
    }
    struct port *port = &ports[number];
    if (strcmp(verb, "rate") == 0) {
        port->mbit = value;
    } else if (strcmp(verb, "delay") == 0) {
        port->delay_ns = (uint64_t)(value * 1000);
    } else if (strcmp(verb, "loss") == 0) {
        port->loss_ppm = (uint32_t)value;
        choose_offloads();
    } else if (strcmp(verb, "link") == 0) {
        int carrier = port->plugged = value != 0;
        if (ioctl(port->fd, TUNSETCARRIER, &carrier) < 0) {
            printf("error: TUNSETCARRIER: %s\n", strerror(errno));
            return;
        }
    } else {
        printf("error: not a command: %s\n", line);
        return;
    }
    puts("ok");
}

/* Reads commands; returns 0 at the end of stdin. */
static int commands(void)
{
    static char line[256];
    static size_t held;
    ssize_t got = read(STDIN_FILENO, line + held, sizeof line - 1 - held);
    if (got <= 0)
        return 0;
    held += (size_t)got;
    for (char *end; (end = memchr(line, '\n', held));) {
        *end = 0;
        obey(line);
        held -= (size_t)(end + 1 - line);
        memmove(line, end + 1, held);
    }
    fflush(stdout);
    return held < sizeof line - 1;
}

static void make_port(const char *namespace)
{
    struct port *port = &ports[count++];
    struct ifreq request = { .ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR };
    int space = open(namespace, O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET) < 0)
        fail("cannot enter", namespace);
    close(space);
    port->plugged = 1;
    port->fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (port->fd < 0)
        fail("cannot open", "/dev/net/tun");
    strcpy(request.ifr_name, "eth0");
    if (ioctl(port->fd, TUNSETIFF, &request) < 0)
        fail("cannot make eth0 in", namespace);
}

int main(int argc, char **argv)
{
    if (argc < 2 || argc - 1 > PORTS) {
        fprintf(stderr, "usage: switch NAMESPACE... (at most %d)\n", PORTS);
        return 2;
    }
    int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    for (int i = 1; i < argc; i++)
        make_port(argv[i]);
    if (home < 0 || setns(home, CLONE_NEWNET) < 0)
        fail("cannot leave", argv[argc - 1]);
    choose_offloads();
    prctl(PR_SET_TIMERSLACK, 1000ul, 0, 0, 0);
    /* The cable must not wait for the hosts' own work. */
    struct sched_param priority = { .sched_priority = 10 };
    if (sched_setscheduler(0, SCHED_FIFO, &priority) < 0)
        setpriority(PRIO_PROCESS, 0, -15);
    puts("ready");
    fflush(stdout);

    struct pollfd wait[PORTS + 1];
    for (int i = 0; i < count; i++)
        wait[i] = (struct pollfd){ .fd = ports[i].fd, .events = POLLIN };
    wait[count] = (struct pollfd){ .fd = STDIN_FILENO, .events = POLLIN };
    for (;;) {
        uint64_t next = deliver(), now = clock_ns();
        uint64_t left = next > now ? next - now : 0;
        struct timespec until = { (time_t)(left / SECOND), (long)(left % SECOND) };
        if (ppoll(wait, (nfds_t)count + 1, next ? &until : NULL, NULL) < 0 && errno != EINTR)
            fail("ppoll", "");
        if (wait[count].revents && !commands())
            return 0;
        for (int i = 0; i < count; i++) {
            if (wait[i].revents & POLLIN)
                receive(i);
            else if (wait[i].revents)
                wait[i].fd = -1;    /* the namespace and its device are gone */
        }
    }
}
