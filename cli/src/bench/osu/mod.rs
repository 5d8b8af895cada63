//! Latency and bandwidth of two ranks, in the form of the OSU micro-benchmarks: their
//! sizes, counts, options and columns. Not that program, and no MPI: messages are put by
//! kernels, through the window or out of a region.

mod pattern;
mod rank;
mod start;
mod table;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Arg, ArgAction, ArgMatches, Command};
use pushgate::ranks::{Environment, Given};
use pushgate::settings::{ProxyPlace, Transport, parse_size};
use pushgate::{Error, Membership, Settings};

/// Counts above this size are the smaller ones ("large message" there).
const LARGE: u64 = 8192;
/// Most blocks of a kernel.
const MOST_BLOCKS: u32 = 64;
/// Largest message.
const MOST: u64 = 256 << 20;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Latency,
    Bandwidth,
    Bidirectional,
}

impl Kind {
    const ALL: [Kind; 3] = [Kind::Latency, Kind::Bandwidth, Kind::Bidirectional];

    pub fn name(self) -> &'static str {
        match self {
            Kind::Latency => "osu-latency",
            Kind::Bandwidth => "osu-bw",
            Kind::Bidirectional => "osu-bibw",
        }
    }

    fn about(self) -> &'static str {
        match self {
            Kind::Latency => "Ping-pong of two ranks, half of a round trip, in the form of osu_latency",
            Kind::Bandwidth => "A window of messages one way and an answer, in the form of osu_bw",
            Kind::Bidirectional => "A window of messages both ways at once, in the form of osu_bibw",
        }
    }

    /// Whether a rank sends messages, and whether it receives them.
    pub fn roles(self, rank: usize) -> [bool; 2] {
        match self {
            Kind::Bandwidth => [rank == 0, rank == 1],
            _ => [true, true],
        }
    }

    /// Iterations and warm-up where the command line says nothing.
    fn counts(self, bytes: u64) -> [u64; 2] {
        match (self, bytes > LARGE) {
            (Kind::Latency, false) => [10_000, 100],
            (Kind::Latency, true) => [1_000, 10],
            (_, false) => [100, 10],
            (_, true) => [20, 2],
        }
    }
}

/// Where a rank's messages lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Host,
    Device,
}

impl Place {
    fn letter(self) -> char {
        match self {
            Place::Host => 'H',
            Place::Device => 'D',
        }
    }
}

/// What the command line asks for, checked.
pub struct Options {
    pub kind: Kind,
    pub settings: Settings,
    pub json: bool,
    /// Where the buffers of rank 0 and of rank 1 lie.
    pub buffers: [Place; 2],
    pub sizes: Vec<u64>,
    iterations: Option<u64>,
    warmup: Option<u64>,
    /// Messages of a window.
    pub messages: u32,
    pub validate: bool,
    pub blocks: Option<u32>,
    pub threads: Option<u32>,
    /// One that runs alone here, its peer elsewhere.
    pub rank: Option<u32>,
    /// Where that one stands, by `--rank` or by its launcher.
    pub membership: Option<Membership>,
    pub processes: Option<u32>,
    pub job: Option<String>,
}

impl Options {
    /// Iterations and warm-up for a size.
    pub fn counts(&self, bytes: u64) -> [u64; 2] {
        let [iterations, warmup] = self.kind.counts(bytes);
        [self.iterations.unwrap_or(iterations), self.warmup.unwrap_or(warmup)]
    }

    /// What both ranks must have been asked for.
    fn asked(&self) -> String {
        let sizes = [self.sizes.first(), self.sizes.last()].map(|s| s.copied().unwrap_or_default());
        let count = |n: Option<u64>| n.map_or("default".into(), |n| n.to_string());
        format!(
            "{} -d {} -m {}:{} -W {} -i {} -x {}{}",
            self.kind.name(),
            self.buffers(),
            sizes[0],
            sizes[1],
            self.messages,
            count(self.iterations),
            count(self.warmup),
            if self.validate { " -c" } else { "" }
        )
    }

    /// "H H", "D H", ...
    pub fn buffers(&self) -> String {
        format!("{} {}", self.buffers[0].letter(), self.buffers[1].letter())
    }
}

pub fn commands(settings: impl Fn(Command) -> Command) -> Vec<Command> {
    let option = |short: Option<char>, name: &'static str, value: &'static str, help: &'static str| {
        let arg = Arg::new(name).long(name).value_name(value).help(help);
        match short {
            Some(c) => arg.short(c),
            None => arg,
        }
    };
    let switch = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
    };
    let command = |kind: Kind| {
        let counts = match kind {
            Kind::Latency => ["10000, above 8 KiB 1000", "100, above 8 KiB 10"],
            _ => ["100, above 8 KiB 20", "10, above 8 KiB 2"],
        };
        let mut command = Command::new(kind.name())
            .about(kind.about())
            .arg(
                option(Some('d'), "buffers", "H|D", "Where the buffers of rank 0 and of rank 1 lie: host memory (H), or memory of the device (D); `cuda` or `cpu` before them is --device")
                    .num_args(2..=3)
                    .default_values(["H", "H"]),
            )
            .arg(option(Some('m'), "message-size", "[MIN:]MAX", "Sizes, MIN doubled until MAX (1024-based)").default_value("1:4M"))
            .arg(option(Some('i'), "iterations", "N", "Iterations").help(format!("Iterations measured [default: {}]", counts[0])))
            .arg(option(Some('x'), "warmup", "N", "").help(format!("Iterations before [default: {}]", counts[1])))
            .arg(switch("validation", "Checks every byte, in five windows before those that are measured and in the last of these").short('c'))
            .arg(switch("json", "One JSON object a size"))
            .arg(option(None, "blocks", "N", "Blocks that push messages from device memory [default: 4 on a GPU, 1 on the CPU]"))
            .arg(option(None, "threads", "N", "Threads of a block [default: by the size on a GPU, 1 on the CPU]"))
            .arg(option(None, "processes", "N", "Processes for the two ranks: 2, or 1 for both in one [default: 2; 1 where they share a GPU]"))
            .arg(option(None, "rank", "0|1", "This is one rank, its peer is started elsewhere; with --rendezvous"))
            .arg(option(None, "job", "NAME", "With --rank: the same at both [default: the bench's name]"));
        if kind != Kind::Latency {
            let window = option(
                Some('W'),
                "messages",
                "N",
                "Messages of a window (--window-size is the memory that they go through)",
            );
            command = command.arg(window.default_value("64"));
        }
        settings(command)
    };
    Kind::ALL.into_iter().map(command).collect()
}

/// Runs the bench `name`, if it is one of these benches.
pub fn run(
    name: &str,
    m: &ArgMatches,
    settings: impl Fn(&ArgMatches) -> Result<Settings, Error>,
) -> Option<Result<ExitCode>> {
    let kind = Kind::ALL.into_iter().find(|k| k.name() == name)?;
    Some((|| {
        let mut options = options(kind, m, settings(m)?)?;
        if std::env::var_os(super::ranks::ROLE).is_none() {
            options.membership = membership(&options, &Environment::of_process())?;
            if let Some(place) = options.membership.as_ref().and_then(|found| found.rendezvous.as_ref()) {
                options.settings.rendezvous.clone_from(place);
            }
        }
        check(&options)?;
        start::run(&options)
    })())
}

fn options(kind: Kind, m: &ArgMatches, mut settings: Settings) -> Result<Options, Error> {
    let number = |name: &str, min: u64, max: u64| -> Result<Option<u64>, Error> {
        // Latency has no window.
        let Ok(Some(v)) = m.try_get_one::<String>(name) else { return Ok(None) };
        match v.parse() {
            Ok(n) if (min..=max).contains(&n) => Ok(Some(n)),
            _ => Err(Error::flag(name, v, format!("{min} to {max}"))),
        }
    };
    let mut places: Vec<&str> =
        m.get_many::<String>("buffers").expect("has a default").map(String::as_str).collect();
    let given = places.join(" ");
    let wrong_places =
        || Error::flag("buffers", &given, "H H, D D, H D or D H; before them cuda or cpu, or nothing");
    if places.len() == 3 {
        let device = places.remove(0);
        if !["cuda", "cpu"].contains(&device) {
            return Err(wrong_places());
        }
        settings.set_flag("device", device)?;
    }
    let place = |letter: &str| match letter {
        "H" => Ok(Place::Host),
        "D" => Ok(Place::Device),
        _ => Err(wrong_places()),
    };
    let sizes = m.get_one::<String>("message-size").expect("has a default");
    let (min, max) = sizes.split_once(':').unwrap_or(("1", sizes));
    let sizes = match (parse_size(min), parse_size(max)) {
        (Some(min), Some(max)) if min <= max && max <= MOST => {
            let next = |size: &u64| Some((size * 2).max(1)).filter(|s| *s <= max);
            std::iter::successors(Some(min), next).collect()
        }
        _ => return Err(Error::flag("message-size", sizes, "MAX or MIN:MAX, 0 to 256M")),
    };
    Ok(Options {
        kind,
        json: m.get_flag("json"),
        buffers: [place(places[0])?, place(places[1])?],
        sizes,
        iterations: number("iterations", 1, 1_000_000_000)?,
        warmup: number("warmup", 0, 1_000_000_000)?,
        messages: number("messages", 1, 4096)?.unwrap_or(1) as u32,
        validate: m.get_flag("validation"),
        blocks: number("blocks", 1, MOST_BLOCKS.into())?.map(|n| n as u32),
        threads: number("threads", 1, 1024)?.map(|n| n as u32),
        rank: number("rank", 0, 1)?.map(|n| n as u32),
        processes: number("processes", 1, 2)?.map(|n| n as u32),
        job: m.get_one::<String>("job").cloned(),
        membership: None,
        settings,
    })
}

/// Which of the two ranks this process is; `None`: it runs both.
fn membership(o: &Options, env: &Environment) -> Result<Option<Membership>, Error> {
    let job = o.job.clone().or_else(|| o.rank.map(|_| o.kind.name().into()));
    let given = Given { rank: o.rank, ranks: o.rank.map(|_| 2), job };
    let found = Membership::find(env, &given, &o.settings)?;
    match found {
        // A person in a shell that srun started is no rank of a job of two.
        Some(found) if found.size == 1 => Ok(None),
        Some(found) if found.size != 2 => {
            Err(Error::config("ranks", found.size, format!("2, which {} is to start", found.launcher)))
        }
        found => Ok(found),
    }
}

/// What can't work is said before anything is started.
fn check(o: &Options) -> Result<(), Error> {
    o.settings.check()?;
    let alone = o.settings.rendezvous != "none";
    match o.rank {
        None if alone && o.membership.is_none() => {
            let allowed = "0 at one host and 1 at the other, with a rendezvous";
            return Err(Error::config("rank", "none", allowed));
        }
        Some(rank) if !alone => {
            let allowed = "none without --rendezvous HOST:PORT: both ranks are started here then";
            return Err(Error::flag("rank", rank, allowed));
        }
        _ if o.processes.is_some() && o.membership.is_some() => {
            let allowed = "none with --rank, and none where a launcher starts the ranks";
            return Err(Error::flag("processes", o.processes.expect("it is some"), allowed));
        }
        None if o.job.is_some() && o.membership.is_none() => {
            return Err(Error::flag("job", o.job.as_deref().expect("it is some"), "none without --rank"));
        }
        _ => {}
    }
    if o.settings.proxy == ProxyPlace::Process {
        for (rank, place) in o.buffers.into_iter().enumerate() {
            let [sends, receives] = o.kind.roles(rank);
            if sends && place == Place::Host && o.settings.transports() == [Transport::Local] {
                let allowed = format!(
                    "D for rank {rank}, which sends: out of host memory its peer's engine would read this program's, \
                     which a proxy process is not; or --proxy thread"
                );
                return Err(Error::config("buffers", o.buffers(), allowed));
            }
            if receives && place == Place::Device {
                let allowed = format!(
                    "H for rank {rank}, which receives: a proxy process can't write to this program's device memory; \
                     or --proxy thread"
                );
                return Err(Error::config("buffers", o.buffers(), allowed));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Options, Error> {
        let settings = |mut c: Command| {
            for key in Settings::KEYS {
                c = c.arg(Arg::new(key.flag()).long(key.flag()));
            }
            c
        };
        let m = Command::new("bench")
            .subcommands(commands(settings))
            .try_get_matches_from([&["bench"], args].concat());
        let m = m.unwrap_or_else(|e| panic!("{e}"));
        let (name, m) = m.subcommand().unwrap();
        let kind = Kind::ALL.into_iter().find(|k| k.name() == name).unwrap();
        let mut s = Settings::default();
        for key in Settings::KEYS {
            if let Some(v) = m.get_one::<String>(&key.flag()) {
                s.set(key.name, v)?;
            }
        }
        let o = options(kind, m, s)?;
        check(&o).map(|()| o)
    }

    fn says(args: &[&str]) -> String {
        parse(args).err().expect("refused").to_string()
    }

    #[test]
    fn sizes_counts_and_window_are_those_of_the_original() {
        let o = parse(&["osu-latency"]).unwrap();
        assert_eq!((o.sizes.len(), o.sizes[0], o.sizes[22]), (23, 1, 4 << 20));
        assert_eq!((o.messages, o.buffers()), (1, "H H".into()));
        assert_eq!([o.counts(8192), o.counts(8193)], [[10_000, 100], [1_000, 10]]);
        for name in ["osu-bw", "osu-bibw"] {
            let o = parse(&[name]).unwrap();
            assert_eq!((o.sizes.len(), o.messages), (23, 64));
            assert_eq!([o.counts(1), o.counts(16384)], [[100, 10], [20, 2]]);
        }
        let o = parse(&["osu-bw", "-m", "0:5", "-i", "7", "-x", "0", "-W", "3"]).unwrap();
        assert_eq!((o.sizes.clone(), o.counts(1), o.messages), (vec![0, 1, 2, 4], [7, 0], 3));
        assert_eq!(parse(&["osu-bw", "-m", "3K:16K"]).unwrap().sizes, [3072, 6144, 12288]);
        assert_eq!(parse(&["osu-bw", "-m", "4"]).unwrap().sizes, [1, 2, 4]);
    }

    #[test]
    fn one_of_two_ranks_that_a_launcher_started_runs_alone() {
        let ranks = |size: &str| {
            let names = ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"];
            Environment::new(names.into_iter().zip(["0", size, size]), 1)
        };
        let o = parse(&["osu-bw"]).unwrap();
        assert_eq!(membership(&o, &ranks("2")).unwrap().map(|m| (m.rank, m.size)), Some((0, 2)));
        assert_eq!(membership(&o, &ranks("1")).unwrap(), None);
        let e = membership(&o, &ranks("3")).unwrap_err().to_string();
        assert_eq!(e, "invalid ranks `3`: expected 2, which Open MPI is to start");
        let processes = Options { membership: membership(&o, &ranks("2")).unwrap(), processes: Some(2), ..o };
        let e = check(&processes).unwrap_err().to_string();
        assert!(e.starts_with("invalid processes `2` (from --processes): expected none with --rank"), "{e}");
    }

    #[test]
    fn buffers_are_named_as_there() {
        let o = parse(&["osu-bw", "-d", "cpu", "D", "H", "-c"]).unwrap();
        assert_eq!((o.buffers(), o.validate), ("D H".into(), true));
        assert_eq!(o.settings.device, pushgate::settings::DeviceChoice::Cpu);
        assert!(
            says(&["osu-bw", "-d", "X", "D"])
                .starts_with("invalid buffers `X D` (from --buffers): expected H H, D D")
        );
        assert!(says(&["osu-bw", "-d", "rocm", "D", "D"]).starts_with("invalid buffers `rocm D D`"));
        assert!(says(&["osu-bw", "-m", "8:4"]).starts_with("invalid message-size `8:4`"));
        assert!(says(&["osu-bw", "-m", "1G"]).starts_with("invalid message-size `1G`"));
        assert!(
            says(&["osu-bw", "-i", "0"])
                .starts_with("invalid iterations `0` (from --iterations): expected 1 to")
        );
        assert!(
            says(&["osu-bw", "--rank", "0"])
                .starts_with("invalid rank `0` (from --rank): expected none without --rendezvous")
        );
        assert!(
            says(&["osu-bw", "--qp", "verbs", "--rendezvous", "a:1"])
                .starts_with("invalid rank `none`: expected 0 at one host and 1 at the other")
        );
    }

    #[test]
    fn a_proxy_process_takes_what_it_can_reach() {
        assert!(parse(&["osu-bw", "--proxy", "process", "-d", "D", "H"]).is_ok());
        let no = says(&["osu-bw", "--proxy", "process", "-d", "H", "H"]);
        assert!(no.starts_with("invalid buffers `H H`: expected D for rank 0, which sends"), "{no}");
        let no = says(&["osu-bw", "--proxy", "process", "-d", "D", "D"]);
        assert!(no.starts_with("invalid buffers `D D`: expected H for rank 1, which receives"), "{no}");
        let no = says(&["osu-latency", "--proxy", "process", "-d", "D", "D"]);
        assert!(no.contains("rank 0, which receives"), "{no}");
    }
}
