//! The scenarios by name, and their options. Each scenario is one function that every rank runs, as a thread of one process or
//! as a process of its own.

use super::group::{self, Group};
use super::table::{Table, Version, warnings};

/// The options of every scenario.
#[derive(Clone, Debug)]
pub struct Options {
    /// The plugin's file.
    pub plugin: std::path::PathBuf,
    /// The table.
    pub table: Version,
    /// Ranks are processes, not threads of one process.
    pub processes: bool,
    /// Memory is registered as a GPU's, for a plugin whose GPU is the CPU executor.
    pub gpu: bool,
    /// The number of ranks.
    pub ranks: usize,
    /// Contexts in each context of createContext.
    pub contexts: usize,
    /// The longest operation.
    pub max: usize,
    /// How often a scenario is repeated.
    pub rounds: usize,
    /// Operations of a rank in a round.
    pub times: usize,
    /// Seed of everything that is random.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            plugin: "libnccl-net-pushgate.so".into(),
            table: Version::Rma14,
            processes: false,
            gpu: false,
            ranks: 2,
            contexts: 3,
            max: (5 << 20) + 1,
            rounds: 3,
            times: 300,
            seed: 1,
        }
    }
}

impl Options {
    /// The options as words for another process.
    pub fn arguments(&self) -> Vec<String> {
        let mut words = vec!["--plugin".into(), self.plugin.display().to_string()];
        for (name, value) in [
            ("--table", self.table.name().to_string()),
            ("--ranks", self.ranks.to_string()),
            ("--contexts", self.contexts.to_string()),
            ("--max", self.max.to_string()),
            ("--rounds", self.rounds.to_string()),
            ("--times", self.times.to_string()),
            ("--seed", self.seed.to_string()),
        ] {
            words.extend([name.to_string(), value]);
        }
        for (name, set) in [("--processes", self.processes), ("--gpu", self.gpu)] {
            words.extend(set.then(|| name.to_string()));
        }
        words
    }
}

/// What a scenario is.
pub struct Scenario {
    /// The name.
    pub name: &'static str,
    /// What every rank does.
    every: fn(&Options, &Table, Group),
    /// The scenario makes the plugin warn.
    warns: bool,
    /// The rank that ends by a signal.
    killed: Option<usize>,
}

const fn quiet(name: &'static str, every: fn(&Options, &Table, Group)) -> Scenario {
    Scenario { name, every, warns: false, killed: None }
}

const fn warning(name: &'static str, every: fn(&Options, &Table, Group)) -> Scenario {
    Scenario { name, every, warns: true, killed: None }
}

/// All scenarios.
pub const ALL: [Scenario; 18] = [
    quiet("bytes", super::bytes::bytes),
    quiet("order", super::order::order),
    quiet("random", super::random::random),
    warning("depth", super::depth::depth),
    quiet("contexts", super::contexts::contexts),
    quiet("signals", super::signals::signals),
    quiet("late", super::late::late),
    quiet("passive", super::passive::passive),
    warning("stalls", super::late::stalls),
    warning("deregistered", super::late::deregistered),
    warning("wrong", super::wrong::wrong),
    quiet("forked", super::wrong::forked),
    warning("closing", super::closing::closing),
    warning("leaving", super::closing::leaving),
    Scenario { name: "lost", every: super::lost::lost, warns: true, killed: Some(super::lost::VICTIM) },
    warning("exhausted", super::lost::exhausted),
    quiet("growth", super::growth::growth),
    quiet("speed", super::speed::speed),
];

/// Runs a scenario by its name; false if there is none of that name.
pub fn run(name: &str, o: &Options) -> bool {
    let Some(scenario) = ALL.iter().find(|scenario| scenario.name == name) else { return false };
    let one = |group: Group| {
        let table = Table::open(&o.plugin, o.table).unwrap_or_else(|e| panic!("{e}"));
        (scenario.every)(o, &table, group);
        assert!(scenario.warns || warnings().is_empty(), "warnings without a reason: {:#?}", warnings());
    };
    if let Some(group) = Group::of_parent(o) {
        one(group);
    } else if o.processes {
        let (group, children) = Group::processes(o, name);
        one(group);
        for (i, status) in group::ended(children).into_iter().enumerate() {
            let expected = scenario.killed == Some(i + 1);
            assert!(status.success() != expected, "rank {}: {status}", i + 1);
        }
    } else {
        assert!(scenario.killed.is_none(), "{name} needs --processes");
        std::thread::scope(|scope| {
            let mut groups = Group::threads(o.ranks).into_iter();
            let first = groups.next().expect("rank 0");
            let others: Vec<_> = groups.map(|group| scope.spawn(|| one(group))).collect();
            one(first);
            for (i, other) in others.into_iter().enumerate() {
                other.join().unwrap_or_else(|_| panic!("rank {} failed", i + 1));
            }
        });
    }
    true
}
