//! What NCCL did, by its own log: whether it took the plugin and the plugin's tuner, over what its
//! connections go, and what it said last.
//!
//! The lines are those of NCCL 2.20 to 2.30 (src/plugin and src/transport of its source) and, behind `NET/pushgate:`,
//! the plugin's own.

use std::collections::BTreeMap;

use serde::Serialize;

/// The plugin's name in all of its tables.
pub const NAME: &str = "pushgate";

/// A table of functions that NCCL took from a library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Table {
    /// What the table calls itself.
    pub name: String,
    /// `v12`, say; none where NCCL does not tell.
    pub version: Option<String>,
}

impl Table {
    /// Of the rest of a line: `pushgate (v12)`, `pushgate`, `ncclProfiler_v2.`
    fn of(rest: &str) -> Self {
        let (name, version) = match rest.trim().split_once(" (") {
            Some((name, version)) => (name, Some(version.trim_end_matches(['.', ')']).to_owned())),
            None => (rest.trim().trim_end_matches('.'), None),
        };
        Self { name: name.to_owned(), version }
    }

    fn is_ours(&self) -> bool {
        self.name == NAME
    }
}

/// What the log of one rank says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    /// `2.30.7+cuda13.0`.
    pub nccl: Option<String>,
    pub net: Option<Table>,
    pub tuner: Option<Table>,
    /// Connections by what carries them: `NET/pushgate`, `SHM`, `P2P`.
    pub via: BTreeMap<String, u32>,
    /// What the plugin says of itself, without `NET/pushgate: `.
    pub plugin: Vec<String>,
    /// Warnings, of NCCL and of the plugin.
    pub warnings: Vec<String>,
    /// Why a library was not taken.
    pub refused: Vec<String>,
    /// The last line.
    pub last: String,
}

/// What carries a connection, without numbers and ways: `NET/pushgate/0/GDRDMA` is `NET/pushgate`.
fn carrier(via: &str) -> String {
    let mut parts = via.split(['/', ' ']);
    let first = parts.next().unwrap_or_default();
    match (first, parts.next()) {
        ("NET", Some(name)) => format!("NET/{name}"),
        _ => first.to_owned(),
    }
}

impl Evidence {
    pub fn of(log: &str) -> Self {
        let mut found = Evidence::default();
        for line in log.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let (warning, text) = match (line.split_once("NCCL WARN "), line.split_once("NCCL INFO ")) {
                (Some((_, text)), _) => (true, text.trim()),
                (_, Some((_, text))) => (false, text.trim()),
                _ => (false, line),
            };
            found.last = text.to_owned();
            if warning {
                found.warnings.push(text.to_owned());
                continue;
            }
            found.line(text);
        }
        found
    }

    fn line(&mut self, text: &str) {
        let after = |start: &str| text.strip_prefix(start);
        if let Some(rest) = after("NCCL version ") {
            self.nccl = Some(rest.to_owned());
        } else if let Some(rest) = after("NET/Plugin: Loaded net plugin ") {
            self.net = Some(Table::of(rest));
        } else if let Some(rest) = after("TUNER/Plugin: Using ") {
            let rest = rest.strip_prefix("tuner plugin ").unwrap_or(rest);
            // "Using internal tuner plugin."
            if !rest.starts_with("internal") {
                self.tuner = Some(Table::of(rest));
            }
        } else if let Some(rest) = after("NET/pushgate: ") {
            self.plugin.push(rest.to_owned());
        } else if text.contains("is unsupported")
            || text.starts_with("Failed to initialize NET plugin")
            || (text.starts_with("NET/Plugin: ") && text.contains(NAME))
        {
            self.refused.push(text.to_owned());
        } else if let Some((_, via)) = text.split_once(" via ")
            && text.starts_with("Channel ")
        {
            *self.via.entry(carrier(via)).or_default() += 1;
        }
    }

    /// Whether connections of this rank go over the plugin.
    pub fn is_over_the_plugin(&self) -> bool {
        self.via.keys().any(|via| *via == format!("NET/{NAME}"))
    }

    /// The last line that reports a failure: the last warning, else the last line.
    pub fn last_words(&self) -> Option<&str> {
        let last = self.warnings.last().map_or(self.last.as_str(), String::as_str);
        (!last.is_empty()).then_some(last)
    }
}

/// What the logs of all ranks say together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// Every rank's connections go over the plugin.
    pub plugin: bool,
    pub net: Option<Table>,
    pub tuner: Option<Table>,
    /// Connections of all ranks over the plugin.
    pub connections: u32,
    /// What else carries connections.
    pub others: Vec<String>,
    /// Which path GPU memory takes, and why.
    pub path: Option<String>,
}

impl Verdict {
    pub fn of(ranks: &[Evidence]) -> Self {
        let table = |of: fn(&Evidence) -> Option<&Table>| {
            // One rank without it means that NCCL has not taken it.
            let all: Option<Vec<&Table>> = ranks.iter().map(of).collect();
            all.and_then(|all| {
                all.iter().find(|table| !table.is_ours()).or(all.first()).map(|t| (*t).clone())
            })
        };
        let ours = format!("NET/{NAME}");
        let mut others: Vec<String> = ranks.iter().flat_map(|r| r.via.keys().cloned()).collect();
        others.retain(|via| *via != ours);
        others.sort();
        others.dedup();
        Self {
            plugin: !ranks.is_empty() && ranks.iter().all(Evidence::is_over_the_plugin),
            net: table(|r| r.net.as_ref()),
            tuner: table(|r| r.tuner.as_ref()),
            connections: ranks.iter().filter_map(|r| r.via.get(&ours)).sum(),
            others,
            path: ranks.iter().flat_map(|r| &r.plugin).find(|line| line.starts_with("path ")).cloned(),
        }
    }

    /// Sentences: the plugin, the tuner, the path.
    pub fn sentences(&self) -> Vec<String> {
        let version = |t: &Table| t.version.as_ref().map_or(String::new(), |v| format!(", table {v}"));
        let part = |what: &str, table: &Option<Table>, cost: &str| match table {
            Some(t) if t.is_ours() => format!("{what}: taken{}", version(t)),
            Some(t) => format!("{what}: NOT taken, NCCL has taken `{}`: {cost}", t.name),
            None => format!("{what}: NOT taken: {cost}"),
        };
        let others = match self.others.as_slice() {
            [] => String::new(),
            others => format!("; other connections go over {}", others.join(", ")),
        };
        let plugin = match (self.plugin, &self.net) {
            (true, net) => format!(
                "plugin: taken{}, {} connections of all ranks go over it{others}",
                net.as_ref().map_or(String::new(), version),
                self.connections
            ),
            (false, Some(t)) if t.is_ours() => {
                format!("plugin: loaded{}, and NOT used by every rank{others}", version(t))
            }
            _ => format!("plugin: NOT taken{others}"),
        };
        let mut said = vec![
            plugin,
            part(
                "tuner",
                &self.tuner,
                "NCCL chooses protocols by its own model, and may take LL for large messages",
            ),
        ];
        said.extend(self.path.clone());
        said
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank under NCCL 2.30.7 with the plugin; host, process and thread as NCCL writes them.
    const TAKEN: &str = "\
host:4711:4711 [0] NCCL INFO NCCL_NET_PLUGIN set by environment to /x/libnccl-net-pushgate.so
host:4711:4711 [0] NCCL INFO NCCL version 2.30.7+cuda13.0
host:4711:4720 [0] NCCL INFO NET/Plugin: Loaded net plugin pushgate (v12)
host:4711:4720 [0] NCCL INFO Successfully loaded external network plugin /x/libnccl-net-pushgate.so
host:4711:4720 [0] NCCL INFO NET/pushgate: path push: the GPU pushes into the window, and the receiver's pulls out of it (no RDMA)
host:4711:4720 [0] NCCL INFO Initialized NET plugin pushgate
host:4711:4720 [0] NCCL INFO Assigned NET plugin pushgate to comm
host:4711:4720 [0] NCCL INFO Using network pushgate
host:4711:4720 [0] NCCL INFO PROFILER/Plugin: Could not find: libnccl-profiler.so
host:4711:4720 [0] NCCL INFO TUNER/Plugin: Could not find: libnccl-tuner.so
host:4711:4720 [0] NCCL INFO TUNER/Plugin: Using pushgate (v4)
host:4711:4722 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/pushgate/0
host:4711:4722 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/pushgate/3(1)/GDRDMA/Shared
";

    fn table(name: &str, version: &str) -> Option<Table> {
        Some(Table { name: name.into(), version: Some(version.into()) })
    }

    #[test]
    fn a_log_of_a_rank_over_the_plugin_is_read() {
        let e = Evidence::of(TAKEN);
        assert_eq!(e.nccl.as_deref(), Some("2.30.7+cuda13.0"));
        assert_eq!((e.net.clone(), e.tuner.clone()), (table("pushgate", "v12"), table("pushgate", "v4")));
        assert_eq!(e.via, BTreeMap::from([("NET/pushgate".into(), 2)]));
        assert!(e.is_over_the_plugin() && e.warnings.is_empty() && e.refused.is_empty());
        let v = Verdict::of(&[e.clone(), e]);
        assert!(v.plugin && v.connections == 4 && v.others.is_empty(), "{v:?}");
        let said = v.sentences();
        assert_eq!(said[0], "plugin: taken, table v12, 4 connections of all ranks go over it");
        assert_eq!(said[1], "tuner: taken, table v4");
        assert!(said[2].starts_with("path push: the GPU pushes"), "{said:?}");
    }

    #[test]
    fn older_releases_words_are_read_too() {
        let e = Evidence::of(
            "h:1:2 [1] NCCL INFO TUNER/Plugin: Using tuner plugin pushgate\n\
             h:1:2 [1] NCCL INFO NET/Plugin: Loaded net plugin pushgate (v10)\n",
        );
        let ours = Some(Table { name: "pushgate".into(), version: None });
        assert_eq!((e.tuner, e.net), (ours, table("pushgate", "v10")));
        let e = Evidence::of("h:1:2 [1] NCCL INFO TUNER/Plugin: Using internal tuner plugin.\n");
        assert_eq!(e.tuner, None);
    }

    #[test]
    fn what_the_own_transports_of_nccl_carry_is_told_apart() {
        let e = Evidence::of(
            "h:1:2 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct\n\
             h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n\
             h:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/IPC\n\
             h:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0\n\
             h:1:2 [0] NCCL INFO Connected via nothing\n",
        );
        let via: Vec<_> = e.via.iter().map(|(via, n)| format!("{via} {n}")).collect();
        assert_eq!(via, ["NET/Socket 1", "P2P 2", "SHM 1"]);
        let v = Verdict::of(&[e, Evidence::of(TAKEN)]);
        assert!(!v.plugin && v.connections == 2);
        assert_eq!(v.sentences()[0], "plugin: NOT taken; other connections go over NET/Socket, P2P, SHM");
        // Every rank must have taken a table.
        assert!(v.net.is_none() && v.tuner.is_none());
        assert!(!Verdict::of(&[]).plugin);
    }

    #[test]
    fn a_tuner_of_others_is_named_with_what_that_costs() {
        let log =
            TAKEN.replace("TUNER/Plugin: Using pushgate (v4)", "External tuner plugin /t.so is unsupported");
        let e = Evidence::of(&log);
        assert_eq!(e.refused, ["External tuner plugin /t.so is unsupported"]);
        let said = Verdict::of(&[e, Evidence::of(TAKEN)]).sentences();
        assert!(said[1].starts_with("tuner: NOT taken: NCCL chooses protocols"), "{said:?}");
    }

    #[test]
    fn a_failure_is_told_by_the_last_warning_else_by_the_last_line() {
        let e = Evidence::of(
            "h:1:2 [0] NCCL INFO NET/Plugin: Loaded net plugin pushgate (v12)\n\
             \n[2026-11-22 21:00:00] h:1:2 [0] net-plugin/src/ffi/tables.rs:59 NCCL WARN NET/pushgate: init: \
             CUDA_LAUNCH_BLOCKING=1\n\
             h:1:2 [0] NCCL INFO Failed to initialize NET plugin pushgate\n\
             h:1:2 [0] NCCL INFO NET/Plugin: /x/libnccl-net-pushgate.so: no such symbol\n\
             h:1:2 [0] NCCL INFO the end\n",
        );
        assert_eq!(e.last_words(), Some("NET/pushgate: init: CUDA_LAUNCH_BLOCKING=1"));
        assert_eq!(e.refused.len(), 2, "{:?}", e.refused);
        assert_eq!(e.last, "the end");
        assert_eq!(Evidence::of("h:1:2 [0] NCCL INFO the end\n\n").last_words(), Some("the end"));
        assert_eq!(Evidence::of("").last_words(), None);
        // A line that was cut off, as by a process that was killed.
        assert!(Evidence::of("h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via ").via.is_empty());
    }

    #[test]
    fn a_plugin_that_is_loaded_and_not_used_is_told_apart_from_one_that_is_not_found() {
        let unused =
            TAKEN.replace("via NET/pushgate/0", "via SHM/direct").replace("via NET/pushgate/3", "via SHM");
        let v = Verdict::of(&[Evidence::of(&unused)]);
        let said = "plugin: loaded, table v12, and NOT used by every rank; other connections go over ";
        assert!(v.sentences()[0].starts_with(said), "{:?}", v.sentences());
    }
}
