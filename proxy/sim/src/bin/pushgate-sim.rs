//! Runs the simulator over many seeds, on several cores. `cargo xtask sim` builds and starts this.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pushgate_sim::{Cut, MOST_RANKS, Outcome, Plant, Shrunk, Simulator};

const USAGE: &str = "\
Simulates clusters in virtual time, with random workloads and faults, and checks every promise after each event.

Usage: cargo xtask sim [--seeds N] [--seed S] [--ranks A..B] [--tcp] [--minutes M] [--cpu-minutes M] [--plant NAME] [--jobs N]
                       [--json] [--trace]

  --seeds N        run N seeds [default: 1000; without a limit with --minutes or --cpu-minutes;
                   1 with --seed]
  --seed S         the first seed [default: 1]
  --ranks A..B     fewest and most ranks, 2 to 16; or one number [default: 2..16]
  --tcp            all queue pairs go over TCP
  --minutes M      stop after M minutes (0.5 is 30 s)
  --cpu-minutes M  stop after M minutes of CPU time, of all threads together
  --plant NAME     switch a fault of ours on: p1 p2 p3 p4 p4-forged p5 p5-settled p6 p6-landed p6-stale p6-hole p6-overlap p6-fence p6-cleared p6-late p6-early p6-session p7 p7-ready p7-attempt
                   p8; `all` tries each and tells after how many seeds it is found
  --jobs N         seeds that run at a time [default: one for each core]
  --json           print one JSON object, and nothing else, on standard output
  --trace          print each event to standard error (with --seed)
  --no-shrink      do not make a failing run smaller

What a failing run prints, to replay it made smaller:
  --keep-qps A,B   make only these queue pairs; `none`
  --keep-faults A  let only these faults happen; `none`
  --messages N     at most N messages in one direction of a queue pair
  --salt N         another schedule

The exit status is 0, 1 if a promise was broken (with `--plant all`: if a fault was not found), 2 for a wrong call.";

/// Runs that are tried to make a failing one smaller.
const SHRINK: u32 = 1500;
/// Between two lines of progress.
const PROGRESS: Duration = Duration::from_secs(20);

struct Options {
    seeds: Option<u64>,
    seed: Option<u64>,
    cut: Cut,
    limit: Option<Duration>,
    cpu_limit: Option<Duration>,
    plant: Option<Plant>,
    all_plants: bool,
    jobs: usize,
    json: bool,
    trace: bool,
    shrink: bool,
}

fn list(text: &str) -> Result<Vec<u32>, String> {
    match text {
        "none" => Ok(Vec::new()),
        _ => text.split(',').map(|n| n.parse().map_err(|_| format!("`{n}` is no number"))).collect(),
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("`{text}` is no number that fits"))
}

fn minutes(flag: &str, text: &str) -> Result<Duration, String> {
    let limit = Duration::try_from_secs_f64(number::<f64>(text)? * 60.0).ok();
    limit.filter(|limit| !limit.is_zero()).ok_or(format!("{flag}: expected a time"))
}

/// The CPU time of this process, of all its threads together.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn ranks(text: &str) -> Result<(u32, u32), String> {
    let (low, high) = text.split_once("..").unwrap_or((text, text));
    let (low, high) = (number(low)?, number(high.trim_start_matches('='))?);
    match 2 <= low && low <= high && high <= MOST_RANKS {
        true => Ok((low, high)),
        false => Err(format!("ranks {low}..{high}: expected 2 to {MOST_RANKS}, the lower number first")),
    }
}

impl Options {
    /// `None`: help was asked for.
    fn parse(arguments: impl Iterator<Item = String>) -> Result<Option<Options>, String> {
        let mut o = Options {
            seeds: None,
            seed: None,
            cut: Cut::default(),
            limit: None,
            cpu_limit: None,
            plant: None,
            all_plants: false,
            jobs: std::thread::available_parallelism().map_or(1, |n| n.get()),
            json: false,
            trace: false,
            shrink: true,
        };
        let mut arguments = arguments.flat_map(|a| match a.split_once('=') {
            Some((flag, value)) if flag.starts_with("--") => vec![flag.to_string(), value.to_string()],
            _ => vec![a],
        });
        while let Some(flag) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{flag} needs a value"));
            match &*flag {
                "--seeds" => o.seeds = Some(number(&value()?)?),
                "--seed" => o.seed = Some(number(&value()?)?),
                "--ranks" => o.cut.ranks = ranks(&value()?)?,
                "--tcp" => o.cut.tcp = true,
                "--minutes" => o.limit = Some(minutes(&flag, &value()?)?),
                "--cpu-minutes" => o.cpu_limit = Some(minutes(&flag, &value()?)?),
                "--plant" => match &*value()? {
                    "all" => o.all_plants = true,
                    name => {
                        let names: Vec<_> = Plant::ALL.iter().map(|(name, _)| *name).collect();
                        let plant = Plant::named(name);
                        o.plant = Some(
                            plant.ok_or(format!("--plant `{name}`: expected all, {}", names.join(", ")))?,
                        );
                    }
                },
                "--jobs" => o.jobs = number::<usize>(&value()?)?.max(1),
                "--keep-qps" => o.cut.qps = Some(list(&value()?)?),
                "--keep-faults" => o.cut.faults = Some(list(&value()?)?),
                "--messages" => o.cut.messages = number(&value()?)?,
                "--salt" => o.cut.salt = number(&value()?)?,
                "--json" => o.json = true,
                "--trace" => o.trace = true,
                "--no-shrink" => o.shrink = false,
                "--help" | "-h" => return Ok(None),
                other => return Err(format!("unknown argument `{other}`")),
            }
        }
        Ok(Some(o))
    }

    /// Whether the time is over that the options set.
    fn is_over(&self, begin: Instant) -> bool {
        self.limit.is_some_and(|limit| begin.elapsed() >= limit)
            || self.cpu_limit.is_some_and(|limit| cpu_time() >= limit)
    }

    fn first(&self) -> u64 {
        self.seed.unwrap_or(1)
    }

    fn end(&self) -> u64 {
        let default = match (self.limit.or(self.cpu_limit), self.seed) {
            (Some(_), _) => u64::MAX,
            (None, Some(_)) => 1,
            (None, None) => 1000,
        };
        self.first().saturating_add(self.seeds.unwrap_or(default))
    }
}

/// What all runs came to.
#[derive(Default)]
struct Total {
    seeds: u64,
    steps: u64,
    time: u128,
    sleeps: u64,
    messages: Vec<u32>,
    faults: Vec<u32>,
    /// Runs of 16 ranks.
    large: u64,
    /// Queue pairs, those whose ends met at a later attempt, and those whose ends did not meet.
    qps: [u64; 3],
    /// Links of rails that broke, and stripes that were lost with them.
    rails: [u64; 2],
    /// Links that took the place of one that broke, those of rails too.
    recovered: u64,
    /// Engines that died and were replaced.
    restarted: u64,
    hash: u64,
    failed: Option<Outcome>,
}

impl Total {
    fn add(&mut self, outcome: Outcome) {
        self.seeds += 1;
        self.steps += outcome.steps;
        self.time += outcome.time as u128;
        self.sleeps += outcome.sleeps;
        self.messages.push(outcome.messages as u32);
        self.faults.push(outcome.faults);
        self.large += (outcome.ranks == MOST_RANKS) as u64;
        let qps = [outcome.qps, outcome.repeated, outcome.unmet];
        self.qps.iter_mut().zip(qps).for_each(|(sum, n)| *sum += n as u64);
        self.recovered += outcome.recovered;
        self.restarted += outcome.restarted as u64;
        self.rails[0] += outcome.rails_broken as u64;
        self.rails[1] += outcome.stripes_lost as u64;
        // In whatever order the runs end.
        self.hash ^= (outcome.hash ^ outcome.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
            .wrapping_mul(0xd134_2543_de82_ef95);
        if outcome.violation.is_some() && self.failed.as_ref().is_none_or(|f| outcome.seed < f.seed) {
            self.failed = Some(outcome);
        }
    }
}

fn median(values: &mut [u32]) -> u32 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

/// Runs seeds until one fails, the last one is done, or the time is over. The lowest seed that fails is the one that is told.
fn run(options: &Options, plant: Option<Plant>, begin: Instant) -> Total {
    let (next, stop) = (AtomicU64::new(options.first()), AtomicU64::new(options.end()));
    let total = Mutex::new(Total::default());
    let printed = Mutex::new(begin);
    std::thread::scope(|scope| {
        for _ in 0..options.jobs {
            scope.spawn(|| {
                let mut simulator = Simulator::new();
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= stop.load(Ordering::Relaxed) || options.is_over(begin) {
                        return;
                    }
                    let outcome = simulator.run(seed, &options.cut, plant, options.trace);
                    if outcome.violation.is_some() {
                        stop.fetch_min(seed, Ordering::Relaxed);
                    }
                    let mut total = total.lock().expect("no run panics outside of its own guard");
                    total.add(outcome);
                    let mut printed = printed.lock().expect("as above");
                    if printed.elapsed() >= PROGRESS {
                        *printed = Instant::now();
                        eprintln!(
                            "{} seeds, {:.1e} steps, {} s",
                            total.seeds,
                            total.steps as f64,
                            begin.elapsed().as_secs()
                        );
                    }
                }
            });
        }
    });
    total.into_inner().expect("as above")
}

/// The command that replays a run.
fn command(seed: u64, cut: &Cut, plant: Option<Plant>) -> String {
    let mut text = format!("cargo xtask sim --seed {seed}");
    let list = |all: &[u32]| match all {
        [] => "none".to_string(),
        _ => all.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
    };
    if cut.ranks != (2, MOST_RANKS) {
        text += &format!(" --ranks {}..{}", cut.ranks.0, cut.ranks.1);
    }
    if cut.tcp {
        text += " --tcp";
    }
    if let Some(qps) = &cut.qps {
        text += &format!(" --keep-qps {}", list(qps));
    }
    if let Some(faults) = &cut.faults {
        text += &format!(" --keep-faults {}", list(faults));
    }
    if cut.messages != u32::MAX {
        text += &format!(" --messages {}", cut.messages);
    }
    if cut.salt != 0 {
        text += &format!(" --salt {}", cut.salt);
    }
    if let Some((name, _)) = plant.and_then(|plant| Plant::ALL.iter().find(|(_, p)| *p == plant)) {
        text += &format!(" --plant {name}");
    }
    text
}

fn sentence(outcome: &Outcome) -> String {
    match &outcome.violation {
        Some(v) if v.promise == 0 => format!("panic: {}", v.sentence),
        Some(v) => format!("P{} is broken: {}", v.promise, v.sentence),
        None => "nothing is broken".into(),
    }
}

fn json_of(outcome: &Outcome, cut: &Cut, plant: Option<Plant>) -> serde_json::Value {
    let promise = outcome.violation.as_ref().map(|v| v.promise);
    serde_json::json!({
        "seed": outcome.seed,
        "promise": promise.filter(|p| *p > 0).map(|p| format!("P{p}")),
        "sentence": sentence(outcome),
        "step": outcome.steps,
        "ranks": outcome.ranks,
        "qps": outcome.qps,
        "messages": outcome.messages,
        "faults": outcome.faults,
        "hash": format!("{:016x}", outcome.hash),
        "command": command(outcome.seed, cut, plant),
    })
}

fn tell(outcome: &Outcome, cut: &Cut, plant: Option<Plant>, what: &str) {
    eprintln!(
        "{what}: step {}, {} ranks, {} queue pairs, {} messages, {} faults",
        outcome.steps, outcome.ranks, outcome.qps, outcome.messages, outcome.faults
    );
    eprintln!("  {}", sentence(outcome));
    eprintln!("  replay: {}", command(outcome.seed, cut, plant));
}

/// Tries each planted fault. True if all are found.
fn plants(options: &Options) -> (bool, serde_json::Value) {
    let (mut all, mut rows) = (true, Vec::new());
    for (name, plant) in Plant::ALL {
        let total = run(options, Some(plant), Instant::now());
        let seeds = total.failed.as_ref().map(|f| f.seed - options.first() + 1);
        all &= seeds.is_some();
        let said = total.failed.as_ref().map_or("not found".into(), sentence);
        eprintln!(
            "{name}: {} seeds: {said}",
            seeds.map_or_else(|| format!("more than {}", total.seeds), |n| n.to_string())
        );
        rows.push(serde_json::json!({ "plant": name, "seeds": seeds, "sentence": said }));
    }
    (all, rows.into())
}

/// Prints the result on standard output, if there is somebody who reads it.
fn print(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            print(USAGE);
            return ExitCode::SUCCESS;
        }
        Err(why) => {
            eprintln!("error: {why}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let begin = Instant::now();
    if options.all_plants {
        let (found, rows) = plants(&options);
        if options.json {
            print(&serde_json::json!({ "plants": rows }).to_string());
        }
        return ExitCode::from(!found as u8);
    }
    let mut total = run(&options, options.plant, begin);
    let (seconds, cpu) = (begin.elapsed().as_secs_f64(), cpu_time());
    let failed = total.failed.take();
    let mut shrunk: Option<Shrunk> = None;
    if let Some(failed) = &failed {
        for event in &failed.last {
            eprintln!("  {event}");
        }
        tell(failed, &options.cut, options.plant, &format!("seed {}", failed.seed));
        if options.shrink {
            let small = Simulator::new().shrink(&options.cut, failed, options.plant, SHRINK);
            for event in &small.outcome.last {
                eprintln!("  {event}");
            }
            tell(&small.outcome, &small.cut, options.plant, &format!("made smaller in {} runs", small.tried));
            shrunk = Some(small);
        }
    }
    let (messages, faults) = (median(&mut total.messages), median(&mut total.faults));
    let large = total.large as f64 / total.seeds.max(1) as f64;
    if options.json {
        let result = serde_json::json!({
            "seeds": total.seeds,
            "steps": total.steps,
            "seconds": seconds,
            "virtual_seconds": total.time as f64 / 1e9,
            "sleeps": total.sleeps,
            "median_messages": messages,
            "median_faults": faults,
            "of_16_ranks": large,
            "qps": total.qps[0],
            "qps_met_later": total.qps[1],
            "qps_unmet": total.qps[2],
            "links_replaced": total.recovered,
            "engines_replaced": total.restarted,
            "rails_broken": total.rails[0],
            "stripes_lost": total.rails[1],
            "hash": format!("{:016x}", total.hash),
            "failed": failed.as_ref().map(|f| json_of(f, &options.cut, options.plant)),
            "shrunk": shrunk.as_ref().map(|s| json_of(&s.outcome, &s.cut, options.plant)),
        });
        print(&result.to_string());
    } else {
        print(&format!(
            "{} seeds, {} steps in {seconds:.1} s ({:.2} us of CPU time each), {:.0} s of virtual time; median {messages} messages and \
             {faults} faults; {:.1} % of 16 ranks; of {} queue pairs {} met at a later attempt and {} not; {} links were replaced; {} engines died and were replaced; {} links of rails broke, and {} stripes were lost with them; {} sleeps; hash {:016x}; {}",
            total.seeds,
            total.steps,
            cpu.as_secs_f64() * 1e6 / total.steps.max(1) as f64,
            total.time as f64 / 1e9,
            large * 100.0,
            total.qps[0],
            total.qps[1],
            total.qps[2],
            total.recovered,
            total.restarted,
            total.rails[0],
            total.rails[1],
            total.sleeps,
            total.hash,
            if failed.is_some() { "a promise is broken" } else { "clean" }
        ));
    }
    ExitCode::from(failed.is_some() as u8)
}
