//! Benches. Each measures its ceiling in the same run, by the same clock, and
//! prints both and the ratio: figures of two runs on shared machines say little.

mod allreduce;
mod ends;
mod idle;
mod latency;
mod local;
mod nccl_trace;
mod osu;
mod peers;
mod push;
mod ranks;
mod rate;
mod rdma;
mod tcp;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Arg, ArgAction, ArgMatches, Command};
use pushgate::settings::parse_size;
use pushgate::zerocopy::{Immutable, IntoBytes};
use pushgate::{
    Comm, Context, DeviceBuffer, Error, QpConfig, QueuePair, Running, Settings, WaitOutcome, status_name,
};
use serde_json::json;

pub use ranks::ROLE;

use crate::output::outln;

pub fn command(settings: impl Fn(Command) -> Command) -> Command {
    let bench = |name: &'static str, about: &'static str, bytes: &'static str| {
        let c = Command::new(name)
            .about(about)
            .arg(
                Arg::new("json")
                    .long("json")
                    .action(ArgAction::SetTrue)
                    .help("One JSON object a measurement"),
            )
            .arg(
                Arg::new("runs")
                    .long("runs")
                    .value_name("N")
                    .default_value("5")
                    .help("Runs; the best counts"),
            )
            .arg(
                Arg::new("seconds")
                    .long("seconds")
                    .value_name("S")
                    .default_value("0.3")
                    .help("Aim of one run"),
            );
        settings(if bytes.is_empty() {
            c
        } else {
            c.arg(
                Arg::new("bytes")
                    .long("bytes")
                    .value_name("BYTES,...")
                    .default_value(bytes)
                    .help("Sizes of a message (1024-based)"),
            )
        })
    };
    let number =
        |name: &'static str, help: &'static str| Arg::new(name).long(name).value_name("N").help(help);
    Command::new("bench")
        .about("Measures this host, each figure beside its ceiling")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            bench(
                "push",
                "Stores into the window, with credit and WQEs; ceiling: the same stores alone",
                "256K,1M,4M",
            )
            .arg(number("blocks", "Blocks [default: 4 on a GPU, 1 on the CPU]"))
            .arg(number("threads", "Threads of a block [default: 1024 on a GPU, 1 on the CPU]")),
        )
        .subcommand(bench(
            "latency",
            "One way from device to device through the proxy; ceiling: a bare flag relayed by a CPU thread",
            "8,64,1K,4K,64K",
        ))
        .subcommand(bench("rate", "Inline messages a second; ceiling: bare records without flow control", ""))
        .subcommand(bench("local", "The queue pair alone; ceiling: memcpy", "4K,64K,1M"))
        .subcommand(
            bench(
                "rdma",
                "The verbs queue pair alone, both ends here over one device; beside it: perftest",
                "",
            )
            .arg(Arg::new("mode").value_parser(["bw", "lat"]).help("One way, or to and fro [default: both]"))
            .arg(
                Arg::new("size")
                    .long("size")
                    .value_name("BYTES")
                    .help("Size of a message (1024-based) [default: 64K for bw, 64 for lat]"),
            )
            .arg(number("depth", "Messages that the window holds [default: 16]")),
        )
        .subcommand(
            bench(
                "tcp",
                "The tcp queue pair alone, both ends here; ceiling: a bare socket; beside it: iperf3",
                "",
            )
            .arg(Arg::new("mode").value_parser(["bw", "lat"]).help("One way, or to and fro [default: both]"))
            .arg(
                Arg::new("size")
                    .long("size")
                    .value_name("BYTES,...")
                    .help("Sizes of a message (1024-based) [default: 64K,256K,1M,4M for bw, 64 for lat]"),
            )
            .arg(number("depth", "Messages that the window holds [default: 4 MiB of them, 2 to 16]"))
            .arg(
                Arg::new("address")
                    .long("address")
                    .value_name("IP")
                    .default_value("127.0.0.1")
                    .help("Address of this host that both ends use"),
            ),
        )
        .subcommand(bench("idle", "What an idle engine costs, and adds to the message that ends it", ""))
        .subcommand(
            bench("peers", "What a process holds, and what a message costs, by the number of its peers", "")
                .arg(
                    Arg::new("peers")
                        .long("peers")
                        .value_name("N,...")
                        .default_value("1,4,16,64,256,1024")
                        .help("Numbers of peers; the ratio is to the first of them"),
                ),
        )
        .subcommand(bench("gate", "Staging ring and gate alone, on one core", ""))
        .subcommand(allreduce::command(&settings))
        .subcommand(nccl_trace::command(&settings))
        .subcommands(osu::commands(&settings))
}

/// What a bench is asked for.
pub struct Bench {
    pub settings: Settings,
    pub json: bool,
    pub runs: u32,
    pub seconds: f64,
    pub bytes: Vec<u64>,
    pub blocks: Option<u32>,
    pub threads: Option<u32>,
}

/// Runs a bench. `settings` gets what the queue pairs are, where the bench decides that.
pub fn run(
    m: &ArgMatches,
    settings: impl Fn(&ArgMatches, Option<&str>) -> Result<Settings, Error>,
) -> Result<ExitCode> {
    let (name, m) = m.subcommand().expect("clap requires one");
    if name == "nccl-trace" {
        return nccl_trace::run(m);
    }
    if name == "allreduce" {
        return allreduce::run(m, settings(m, None)?);
    }
    if let Some(done) = osu::run(name, m, |m| settings(m, None)) {
        return done;
    }
    let qp = match name {
        "rdma" => Some("verbs"),
        "tcp" => Some("tcp"),
        _ => None,
    };
    let number = |name: &str, max: u32| -> Result<Option<u32>, Error> {
        // Not every bench has every option.
        let Ok(Some(v)) = m.try_get_one::<String>(name) else { return Ok(None) };
        match v.parse() {
            Ok(n) if (1..=max).contains(&n) => Ok(Some(n)),
            _ => Err(Error::flag(name, v, format!("1 to {max}"))),
        }
    };
    let mut bytes = Vec::new();
    if let Ok(Some(list)) = m.try_get_one::<String>("bytes") {
        for s in list.split(',') {
            let n = parse_size(s)
                .filter(|n| (8..=256 << 20).contains(n) && (*n <= 40 || n % 16 == 0) && n % 8 == 0);
            bytes.push(n.ok_or_else(|| {
                Error::flag("bytes", s, "8 to 40 in steps of 8, or a multiple of 16 up to 256M")
            })?);
        }
    }
    let seconds = m.get_one::<String>("seconds").expect("has a default");
    let bench = Bench {
        settings: settings(m, qp)?,
        json: m.get_flag("json"),
        runs: number("runs", 1000)?.expect("has a default"),
        seconds: seconds
            .parse()
            .ok()
            .filter(|s| (0.001..=60.0).contains(s))
            .ok_or_else(|| Error::flag("seconds", seconds, "0.001 to 60"))?,
        bytes,
        blocks: number("blocks", 4096)?,
        threads: number("threads", 1024)?,
    };
    match name {
        "push" => push::run(&bench),
        "latency" => latency::run(&bench),
        "rate" => rate::run(&bench),
        "local" => local::run(&bench),
        "idle" => idle::run(&bench),
        "peers" => {
            let list = m.get_one::<String>("peers").expect("has a default");
            let number = |v: &str| v.parse().ok().filter(|n| (1..=peers::MOST.into()).contains(n));
            let wrong = || Error::flag("peers", list, format!("numbers of 1 to {}", peers::MOST));
            let all: Option<Vec<u64>> = list.split(',').map(number).collect();
            peers::run(&bench, &all.ok_or_else(wrong)?)
        }
        "rdma" => {
            let size = match m.get_one::<String>("size") {
                None => None,
                Some(v) => Some(
                    parse_size(v)
                        .filter(|n| (8..=256 << 20).contains(n) && n % 8 == 0)
                        .ok_or_else(|| Error::flag("size", v, "8 to 256M in steps of 8"))?,
                ),
            };
            let mode = m.get_one::<String>("mode").cloned();
            rdma::run(&bench, &rdma::Options { mode, size, depth: number("depth", 4096)? })
        }
        "tcp" => {
            let mut sizes = Vec::new();
            for v in m.get_one::<String>("size").iter().flat_map(|list| list.split(',')) {
                let size = parse_size(v).filter(|n| (8..=64 << 20).contains(n) && n % 8 == 0);
                sizes.push(size.ok_or_else(|| Error::flag("size", v, "8 to 64M in steps of 8"))?);
            }
            let address = m.get_one::<String>("address").expect("has a default");
            let address =
                address.parse().map_err(|_| Error::flag("address", address, "an IP address of this host"))?;
            let mode = m.get_one::<String>("mode").cloned();
            tcp::run(&bench, &tcp::Options { mode, sizes, depth: number("depth", 4096)?, address })
        }
        _ => gate(&bench),
    }?;
    Ok(ExitCode::SUCCESS)
}

fn gate(b: &Bench) -> Result<()> {
    type Measure = dyn Fn(u64) -> Result<(u64, Duration)>;
    let releases: &Measure = &|batches| Ok(pushgate_engine::measure::releases(batches));
    let messages: &Measure =
        &|batches| pushgate_engine::measure::messages(batches).map_err(|e| anyhow::anyhow!(e.to_string()));
    for (what, note) in [
        (releases, "staging ring and gate alone, one core"),
        (messages, "all of the engine's part of an inline message, written and read by the same core"),
    ] {
        let mut best = f64::INFINITY;
        let mut batches = 10_000;
        for run in 0..=b.runs {
            let (n, time) = what(batches)?;
            let ns = time.as_nanos() as f64 / n as f64;
            if run == 0 {
                // Warm-up; sets how many make up the time asked for.
                batches = ((b.seconds * 1e9 / ns / 64.0) as u64).max(1);
            } else {
                best = best.min(ns);
            }
        }
        b.print("gate", 8, 1e3 / best, None, "million/s", "cpu", note)?;
    }
    Ok(())
}

impl Bench {
    /// A window of about `wanted` bytes that holds at least `least`.
    pub fn window(&self, wanted: u64, least: u64) -> Result<u64> {
        const MOST: u64 = 512 << 20;
        if least > MOST {
            let allowed = format!("what fits a window of {MOST} bytes, all blocks together");
            return Err(Error::flag("bytes", least, allowed).into());
        }
        Ok(wanted.next_power_of_two().clamp(64, MOST))
    }

    /// Two ranks of this process over one engine, with a queue pair between them.
    pub fn pair(&self, context: &Context, config: QpConfig) -> Result<Pair> {
        let mut comms = Comm::local(context, 2)?;
        let (right, left) = (comms.pop().expect("two"), comms.pop().expect("two"));
        // A rank that fails leaves, so that the other one hears of it and waits no longer.
        let made = |comm: Comm, peer| comm.queue_pair(peer, 0, config).map(|qp| (comm, qp));
        let both = std::thread::scope(|s| {
            let other = s.spawn(|| made(right, 0));
            (made(left, 1), other.join().expect("no panic in set-up"))
        });
        match both {
            (Ok((left, a)), Ok((right, b))) => Ok(Pair { ends: [a, b], _comms: [left, right] }),
            // The other rank's error says why that one left.
            (Err(Error::PeerLost { .. } | Error::Aborted { .. }), Err(e)) | (Err(e), _) | (_, Err(e)) => {
                Err(e.into())
            }
        }
    }

    /// Prints one measurement: a line of the table or of JSON.
    #[allow(clippy::too_many_arguments)]
    pub fn print(
        &self,
        bench: &str,
        bytes: u64,
        value: f64,
        ceiling: Option<f64>,
        unit: &str,
        device: &str,
        note: &str,
    ) -> Result<()> {
        let ratio = ceiling.map(|c| value / c);
        if self.json {
            let line = json!({
                "bench": bench, "bytes": bytes, "value": value, "ceiling": ceiling, "ratio": ratio, "unit": unit,
                "device": device, "note": note, "runs": self.runs,
            });
            outln!("{line}")?;
        } else {
            let ceiling = match (ceiling, ratio) {
                (Some(c), Some(r)) => format!("ceiling {c:>9.3}  ratio {r:>6.3}"),
                _ => String::new(),
            };
            outln!("{bench:<8} {bytes:>9} B  {value:>9.3} {unit:<18} {ceiling}  {device}: {note}")?;
        }
        Ok(())
    }
}

/// `struct sink_params`: who takes messages and gives them back unread.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
pub struct SinkParams {
    pub qps: u64,
    pub result: u64,
    pub count: u64,
}

/// Two ends of one queue pair, and the ranks that hold them.
pub struct Pair {
    pub ends: [QueuePair; 2],
    _comms: [Comm; 2],
}

impl Pair {
    /// After a kernel said that something was wrong: the cause, if a queue pair knows it.
    pub fn expect_ok(&self, what: &str, results: &DeviceBuffer, codes: usize) -> Result<Vec<u64>> {
        let mut bytes = vec![0; results.len()];
        results.copy_to_host(&mut bytes)?;
        let words: Vec<u64> =
            bytes.chunks_exact(8).map(|c| u64::from_le_bytes(c.try_into().expect("eight bytes"))).collect();
        if let Some(code) = words[..codes].iter().find(|c| **c != 0) {
            for qp in &self.ends {
                qp.check()?;
            }
            bail!("{what} ended with: {}", status_name(*code));
        }
        Ok(words)
    }
}

/// Waits for a kernel; its own waits end first.
pub fn finish(b: &Bench, context: &Context, running: &Running) -> Result<Duration> {
    match context.wait(running, Some(b.settings.timeout * 2 + Duration::from_secs(30)))? {
        WaitOutcome::Done => Ok(running.elapsed()?.expect("it has ended")),
        WaitOutcome::TimedOut => bail!("a kernel did not end"),
    }
}
