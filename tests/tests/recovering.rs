//! Links of queue pairs between ranks break while kernels of the CPU executor send: the kernels notice nothing but time.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pushgate::zerocopy::{Immutable, IntoBytes};
use pushgate::{
    Comm, Context, Error, Launch, Module, QpConfig, QueuePair, Settings, Source, upload_descriptors,
};
use pushgate_tests::hang;

/// `struct churn_params` of the kernel.
#[derive(IntoBytes, Immutable)]
#[zerocopy(crate = "pushgate::zerocopy")]
#[repr(C)]
struct Params {
    qp: u64,
    region: u64,
    out: u64,
    rounds: u64,
    rkey: u32,
    rank: u32,
}

fn context(recover: &str, drive: &str) -> Context {
    let mut settings = Settings::default();
    settings.set("device", "cpu").unwrap();
    settings.set("window-size", "4K").unwrap();
    settings.set("slots", "16").unwrap();
    settings.set("timeout", &hang().as_millis().to_string()).unwrap();
    settings.set("recover", recover).unwrap();
    settings.set("drive", drive).unwrap();
    Context::builder().settings(settings).build().unwrap()
}

/// Two ranks with engines of their own, and the queue pair between them.
fn joined(name: &str, recover: [&str; 2], drive: &str) -> [(Comm, Context, QueuePair); 2] {
    let job = format!("{name}-{}", std::process::id());
    let rank = |rank: u32| {
        let context = context(recover[rank as usize], drive);
        let comm = Comm::connect(&context, &job, rank, 2).unwrap();
        let qp = comm.queue_pair(1 - rank, 3, QpConfig::default()).unwrap();
        (comm, context, qp)
    };
    std::thread::scope(|s| {
        let other = s.spawn(|| rank(1));
        [rank(0), other.join().unwrap()]
    })
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < hang(), "waiting for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn p6_kernels_lose_nothing_when_links_break_under_them() {
    // An engine of the program's calls is driven by its own thread while the kernels run.
    for drive in ["thread", "caller"] {
        churn(drive);
    }
}

fn churn(drive: &str) {
    const ROUNDS: u64 = 5_000;
    const BREAKS: u64 = 100;
    let ranks = joined(&format!("churn-{drive}"), ["auto"; 2], drive);
    let text = include_str!("recovering.cu");
    let mut running = Vec::new();
    let parts = ranks.each_ref().map(|(_, context, qp)| {
        let region = context.shared("churn", 8).unwrap();
        let registered = qp.register_shared(&region).unwrap();
        let module = Module::from_source(context, &Source::text("recovering.cu", text)).unwrap();
        (region, registered, module, context.alloc(24).unwrap(), upload_descriptors(context, [qp]).unwrap())
    });
    for (i, (_, context, _)) in ranks.iter().enumerate() {
        let (region, _, module, out, qps) = &parts[i];
        let params = Params {
            qp: qps.addr(),
            region: region.device_addr(),
            out: out.addr(),
            rounds: ROUNDS,
            rkey: parts[1 - i].1.key(),
            rank: i as u32,
        };
        let stream = context.stream().unwrap();
        let launch = Launch::new(1, 1).cooperating();
        // SAFETY: what the parameters name outlives the kernel, which is waited for below.
        running.push(unsafe { context.launch(&stream, module, "churn", launch, &params).unwrap() });
    }
    let (begin, mut breaks) = (Instant::now(), 0);
    let done = || running.iter().all(|running| running.is_done().unwrap());
    let rounds = || parts.each_ref().map(|part| part.0.words(0, 1)[0].load(Ordering::Relaxed));
    while !done() && breaks < BREAKS {
        // Links that break again before anything has got through would end the queue pair after `recover`.
        let before = rounds();
        until("the kernels", || done() || rounds().iter().zip(before).all(|(now, before)| *now > before + 1));
        breaks += ranks[breaks as usize % 2].2.break_link().unwrap() as u64;
    }
    until("the kernels' end", done);
    let replaced = ranks.each_ref().map(|(_, _, qp)| qp.links_replaced().unwrap());
    println!("drive = {drive}: {breaks} breaks, {replaced:?} links replaced, {:?}", begin.elapsed());
    for (i, (.., out, _)) in parts.iter().enumerate() {
        let mut bytes = [0; 24];
        out.copy_to_host(&mut bytes).unwrap();
        let [status, rounds, wrong] =
            [0, 8, 16].map(|at| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes")));
        assert_eq!((status, rounds, wrong), (0, ROUNDS, 0), "rank {i}");
    }
    assert!(replaced.iter().all(|n| *n > 0) && breaks > 0, "no link broke while the kernels ran");
}

#[test]
fn p7_a_link_breaks_for_good_where_one_rank_does_not_recover() {
    let [(_a, _, qp), (_b, _, theirs)] = joined("no-recovery", ["auto", "0"], "thread");
    assert!(!qp.break_link().unwrap(), "it ends with its link");
    for (qp, rank) in [(qp, "this"), (theirs, "the other")] {
        until("the end", || qp.check().is_err());
        let e = qp.check().unwrap_err();
        assert!(matches!(e, Error::Transport { .. }), "{rank} rank: {e}");
    }
}

#[test]
fn p7_a_rank_that_drops_its_queue_pair_ends_the_peers_recovery() {
    let [(_a, _, qp), (_b, _, theirs)] = joined("dropped", ["auto"; 2], "thread");
    drop(theirs);
    // The peer took nothing back that it had promised, so nothing has been told yet.
    assert!(qp.check().is_ok() && qp.break_link().unwrap());
    until("the end", || qp.check().is_err());
    let e = qp.check().unwrap_err();
    assert!(matches!(e, Error::Aborted { .. }), "{e}");
}
