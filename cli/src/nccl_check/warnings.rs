//! What spoils NCCL over the plugin, as far as it can be seen before anything is started.

use std::path::Path;

use super::evidence::NAME;
use super::transport;

/// Cores below which a rank's threads take turns.
const CORES_A_RANK: usize = 2;

/// What is known of this run.
pub struct Situation<'a> {
    /// Cores that this process may use, which its ranks inherit.
    pub cores: usize,
    pub ranks: u32,
    pub gpus: u32,
    /// NCCL's version.
    pub nccl: (u32, u32, u32),
    pub plugin: &'a Path,
    /// The environment's variables.
    pub variables: Vec<(String, String)>,
}

impl Situation<'_> {
    fn variable(&self, name: &str) -> Option<&str> {
        let found = self.variables.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str()).filter(|value| !value.is_empty())
    }

    /// Sentences: what is there, what it costs, what to do.
    pub fn warnings(&self) -> Vec<String> {
        let mut said = Vec::new();
        if self.gpus < self.ranks {
            said.push(format!(
                "{} ranks share {}: their kernels take turns in slices of milliseconds, so times mean little, and the \
                 check shows function alone; each rank has an NCCL_HOSTID of its own, or NCCL would refuse a GPU twice",
                self.ranks,
                if self.gpus == 1 { "one GPU".into() } else { format!("{} GPUs", self.gpus) }
            ));
        }
        let needed = CORES_A_RANK * self.ranks as usize;
        if self.cores < needed {
            said.push(format!(
                "this process may use {} of the host's cores, for {} ranks: threads of a rank need {CORES_A_RANK} at \
                 least, better four; bind less (mpirun --bind-to none, taskset, the container's CPU limit)",
                self.cores, self.ranks
            ));
        }
        let (major, minor, patch) = self.nccl;
        if (major, minor) < (2, 20) {
            said.push(format!(
                "NCCL is {major}.{minor}.{patch}: it looks for no table that the plugin has (v8 to v12); take 2.20 or \
                 later"
            ));
        }
        if let Some(value) = self.variable("NCCL_TUNER_PLUGIN")
            && !is_the_plugin(value, self.plugin)
        {
            said.push(format!(
                "NCCL_TUNER_PLUGIN is {value}: NCCL does not take the plugin's tuner, which keeps LL from large messages; unset \
                 the variable"
            ));
        }
        let others: Vec<String> = (self.variables.iter())
            .filter(|(name, _)| name.starts_with("NCCL_") && !transport::is_ours(name))
            .filter(|(name, _)| name != "NCCL_TUNER_PLUGIN")
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        if !others.is_empty() {
            said.push(format!("the environment tells NCCL, for every transport: {}", others.join(" ")));
        }
        said
    }
}

/// Whether a variable that names a library names the plugin's.
fn is_the_plugin(value: &str, plugin: &Path) -> bool {
    value == NAME || Path::new(value) == plugin || Path::new(value).file_name() == plugin.file_name()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Situation<'static> {
        Situation {
            cores: 8,
            ranks: 2,
            gpus: 2,
            nccl: (2, 30, 7),
            plugin: Path::new("/x/libnccl-net-pushgate.so"),
            variables: vec![("HOME".into(), "/root".into()), ("NCCL_NET".into(), "IB".into())],
        }
    }

    /// The one warning that a change brings.
    #[track_caller]
    fn warning(change: impl FnOnce(&mut Situation)) -> String {
        let mut situation = good();
        change(&mut situation);
        let said = situation.warnings();
        assert_eq!(said.len(), 1, "{said:?}");
        said.into_iter().next().unwrap()
    }

    fn with(name: &str, value: &str) -> String {
        warning(|s| s.variables.push((name.into(), value.into())))
    }

    #[test]
    fn nothing_is_said_where_nothing_spoils_it() {
        assert_eq!(good().warnings(), Vec::<String>::new());
        for (name, value) in [
            ("CUDA_LAUNCH_BLOCKING", "1"),
            ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
            ("NCCL_TUNER_PLUGIN", "/x/libnccl-net-pushgate.so"),
            ("NCCL_TUNER_PLUGIN", "libnccl-net-pushgate.so"),
            // This program sets these itself.
            ("NCCL_DEBUG", "WARN"),
            ("NCCL_P2P_DISABLE", "1"),
        ] {
            let mut situation = good();
            situation.variables.push((name.into(), value.into()));
            assert_eq!(situation.warnings(), Vec::<String>::new(), "{name}={value}");
        }
    }

    #[test]
    fn each_thing_that_spoils_it_is_one_sentence() {
        assert!(
            warning(|s| s.cores = 3).starts_with("this process may use 3 of the host's cores, for 2 ranks")
        );
        assert!(warning(|s| s.gpus = 1).starts_with("2 ranks share one GPU: their kernels take turns"));
        assert!(warning(|s| s.nccl = (2, 19, 3)).starts_with("NCCL is 2.19.3: it looks for no table"));
        assert!(
            with("NCCL_TUNER_PLUGIN", "none").starts_with("NCCL_TUNER_PLUGIN is none: NCCL does not take")
        );
        let others = with("NCCL_PROTO", "LL");
        assert_eq!(others, "the environment tells NCCL, for every transport: NCCL_PROTO=LL");
    }
}
