/* The threads that run kernels' parallel loops; linked into every kernel.so for a CPU.
 *
 * A kernel calls TVM's hook `__TVMBackendParallelLaunch(body, data, 0)` and wants body(task, env,
 * data) called for every task below a number of the hook's choice.  TVM's own pool gives a thread
 * one task and waits for the slowest, aborts where no thread can be started, joins its threads when
 * the one that made it ends, and competes with torch's, which spin for milliseconds after an
 * operation.
 *
 * Here the calling thread works from the first moment.  A thread has a share of the tasks, one run
 * of memory, and takes from other shares when its own is done: one that starts late or is stopped
 * is waited for during one task only.  Who does a task has no say in the result; all have the
 * caller's floating-point modes.  Idle threads sleep.  Where torch is loaded and there is enough to
 * do, the threads of its OpenMP library work in place of our own.
 *
 * A process uses the pool of the first kernel.so that it loads (runtime/threads.py).
 */
#define _GNU_SOURCE
#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    MOST = 1024,        /* threads */
    TASKS = 16,         /* of a share */
    SPINS = 2000,       /* how long a caller waits awake for the last tasks: some 30 us */
    SPINS_HELD = 20000, /* and a worker for the next of several calls in a row */
    MASK = 1024,        /* bytes of an affinity mask */
};

typedef struct { /* TVM's TVMParallelGroupEnv */
    void *sync_handle;
    int32_t num_task;
} Env;

typedef int (*Body)(int task, Env *env, void *data);

typedef struct {
    _Alignas(64) atomic_int next;
    int end;
} Share;

typedef struct {
    _Alignas(64) sem_t wake;
    atomic_int id;     /* of the thread while it sleeps, else 0 */
    atomic_int guided; /* its affinity is to be set back to `mask` when it wakes */
    long mask_size;
    unsigned char mask[MASK];
} Worker;

static struct {
    pthread_mutex_t turn; /* callers take turns */
    Body body;
    void *data;
    fenv_t modes;
    atomic_int failed;
    Share shares[MOST];

    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t done;
    int open, threads, workers;
    atomic_int inside; /* workers that are at this job */
    atomic_int held;   /* callers that have more calls to come */
    Worker worker[MOST];
} pool = {
    .turn = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .done = PTHREAD_COND_INITIALIZER,
};

static struct { /* of an OpenMP library */
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*thread)(void);
} team;

static _Thread_local struct { /* what this thread wants for its calls; 0 threads: one */
    int threads, with_team;
} wanted;
static int forked;

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Do the tasks of share `own`, then those left in the others. */
static void work(int own)
{
    fenv_t before;
    fegetenv(&before);
    fesetenv(&pool.modes);
    int threads = pool.threads;
    Env env = {0, threads * TASKS};
    for (int k = 0; k < threads; ++k) {
        Share *share = &pool.shares[(own + k) % threads];
        int task;
        while ((task = atomic_fetch_add(&share->next, 1)) < share->end)
            if (pool.body(task, &env, pool.data))
                atomic_store(&pool.failed, 1);
    }
    fesetenv(&before);
}

static void work_in_team(void *unused)
{
    work(team.thread());
}

/* Have the kernel wake worker w on another processor than this one, where it would often put it
 * although others are idle (Linux does not look for one while most are busy).  w undoes it. */
static void guide(Worker *w, int id)
{
    unsigned char others[MASK];
    int here = sched_getcpu(), left = 0;
    if (here < 0 || here >= 8 * MASK)
        return;
    w->mask_size = syscall(SYS_sched_getaffinity, id, sizeof w->mask, w->mask);
    for (long i = 0; i < w->mask_size; ++i) {
        others[i] = w->mask[i] & ~(i == here / 8 ? 1 << here % 8 : 0);
        left |= others[i];
    }
    if (left && !syscall(SYS_sched_setaffinity, id, w->mask_size, others))
        atomic_store(&w->guided, 1);
}

/* Wake the workers that thread k is to wake: threads form a binary tree, the caller its root. */
static void wake_below(int k)
{
    for (int child = 2 * k + 1; child <= 2 * k + 2 && child < pool.threads; ++child) {
        Worker *w = &pool.worker[child];
        int pending, id;
        if (child > pool.workers || sem_getvalue(&w->wake, &pending) || pending)
            continue;
        if ((id = atomic_load(&w->id)) && !atomic_load(&w->guided))
            guide(w, id);
        sem_post(&w->wake);
    }
}

static void await_call(Worker *w)
{
    int pending = 0;
    for (int spin = 0; atomic_load(&pool.held) && spin < SPINS_HELD && !pending; ++spin) {
        relax();
        sem_getvalue(&w->wake, &pending);
    }
    if (!pending)
        atomic_store(&w->id, (int)syscall(SYS_gettid));
    while (sem_wait(&w->wake))
        ;
    if (atomic_load(&w->guided)) {
        syscall(SYS_sched_setaffinity, 0, w->mask_size, w->mask);
        atomic_store(&w->guided, 0); /* after it: who sees 0 sees the whole affinity */
    }
    atomic_store(&w->id, 0);
}

static void *serve(void *number)
{
    int k = (int)(intptr_t)number;
    for (;;) {
        await_call(&pool.worker[k]);
        pthread_mutex_lock(&pool.lock);
        int joins = pool.open && k < pool.threads;
        pool.inside += joins;
        pthread_mutex_unlock(&pool.lock);
        if (!joins)
            continue;
        wake_below(k);
        work(k);
        pthread_mutex_lock(&pool.lock);
        if (--pool.inside == 0)
            pthread_cond_signal(&pool.done);
        pthread_mutex_unlock(&pool.lock);
    }
    return 0;
}

/* A forked child has none of the workers, perhaps locks that nobody frees, and an OpenMP library
 * that waits for threads that are gone. */
static void after_fork(void)
{
    pthread_mutex_init(&pool.turn, 0);
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.done, 0);
    pool.open = pool.workers = 0;
    pool.inside = pool.held = 0;
    wanted.threads = 0;
    forked = 1;
}

/* Start workers until there are enough, or as many as this process may have.  They handle no
 * signals, which are the caller's. */
static void hire(int number)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.workers < number) {
        int k = pool.workers + 1;
        pthread_t thread;
        sem_init(&pool.worker[k].wake, 0, 0);
        pool.worker[k].id = pool.worker[k].guided = 0;
        if (pthread_create(&thread, 0, serve, (void *)(intptr_t)k))
            break;
        pthread_detach(thread);
        pool.workers = k;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

static void run_by_workers(int threads)
{
    if (pool.workers < threads - 1)
        hire(threads - 1);
    pthread_mutex_lock(&pool.lock);
    pool.open = 1;
    pthread_mutex_unlock(&pool.lock);
    wake_below(0);
    work(0);
    for (int spin = 0; pool.inside && spin < SPINS; ++spin)
        relax();
    pthread_mutex_lock(&pool.lock);
    pool.open = 0;
    while (pool.inside)
        pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

/* What `__TVMBackendParallelLaunch` is set to. */
int qopt_launch(Body body, void *data, int unused)
{
    int threads = wanted.threads > 0 ? wanted.threads : 1;
    if (threads == 1) {
        Env env = {0, 1};
        return body(0, &env, data);
    }
    pthread_mutex_lock(&pool.turn);
    pthread_mutex_lock(&pool.lock);
    pool.threads = threads;
    pthread_mutex_unlock(&pool.lock);
    pool.body = body;
    pool.data = data;
    fegetenv(&pool.modes);
    pool.failed = 0;
    for (int k = 0; k < threads; ++k) {
        pool.shares[k].end = (k + 1) * TASKS;
        atomic_store(&pool.shares[k].next, k * TASKS);
    }
    if (wanted.with_team && team.parallel && !forked)
        team.parallel(work_in_team, 0, threads, 0);
    else
        run_by_workers(threads);
    int failed = pool.failed;
    pthread_mutex_unlock(&pool.turn);
    return failed ? -1 : 0;
}

/* Calls of this thread that follow use so many threads, those of the OpenMP library where there is
 * one and with_team is not 0; until qopt_end.  Workers stay awake between them, for a fraction of a
 * millisecond each time. */
void qopt_begin(int threads, int with_team)
{
    if (!wanted.threads)
        ++pool.held;
    wanted.threads = threads < MOST ? threads : MOST;
    wanted.with_team = with_team;
}

void qopt_end(void)
{
    if (wanted.threads)
        --pool.held;
    wanted.threads = 0;
}

/* The OpenMP library whose threads may work: GOMP_parallel and omp_get_thread_num. */
void qopt_team(void *parallel, void *thread)
{
    pthread_mutex_lock(&pool.turn);
    *(void **)&team.thread = thread;
    *(void **)&team.parallel = parallel;
    pthread_mutex_unlock(&pool.turn);
}

__attribute__((constructor)) static void prepare(void)
{
    pthread_atfork(0, 0, after_fork);
}
