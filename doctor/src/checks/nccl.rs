//! NCCL and the plugin.

use crate::finding::Finding;
use crate::readings::{Read, Readings};

/// NCCL's version of its code: 2.28.9 of 22809; before 2.9 the code was 2804 for 2.8.4 (nccl.h, NCCL_VERSION).
pub fn version(code: u32) -> (u32, u32, u32) {
    match code {
        0..10_000 => (code / 1000, code % 1000 / 100, code % 100),
        _ => (code / 10_000, code % 10_000 / 100, code % 100),
    }
}

/// The plugin's tables are v8 to v12. NCCL looks for v8 since 2.20, for v12 since 2.30; the plugin
/// was seen under 2.28.9 (docs/nccl.md).
pub fn library(r: &Readings) -> Vec<Finding> {
    vec![match &r.nccl.version {
        Read::Is((code, from)) => {
            let (major, minor, patch) = version(*code);
            let reading = format!("NCCL {major}.{minor}.{patch} ({from})");
            match (major, minor) {
                (2, 20..) => Finding::passed("", reading),
                _ => Finding::warned(
                    "",
                    reading + ", which does not take tables v8 to v12",
                    "install NCCL 2.20 or later, best 2.28 or later",
                ),
            }
        }
        Read::Absent => Finding::not_applicable(
            "",
            "no libnccl.so.2 where the linker or a Python environment would have it",
        ),
        Read::Unreadable(why) => {
            Finding::warned("", why, "install NCCL 2.28 or later (libnccl2, or PyTorch's own)")
        }
    }]
}

/// Found as NCCL looks: NCCL_NET_PLUGIN is a file, or NAME for libnccl-net-NAME.so in the linker's path.
pub fn plugin(r: &Readings) -> Vec<Finding> {
    let n = &r.nccl;
    let remedy = "build it (cargo xtask plugin) and set NCCL_NET_PLUGIN to the file's path, or to pushgate where its folder is in LD_LIBRARY_PATH";
    let variable = n.plugin_variable.as_deref().filter(|v| !v.is_empty());
    let mut findings = vec![match (&n.plugin, variable) {
        (Read::Is(p), _) if p.tables.is_empty() => {
            Finding::failed("", format!("{} has no table ncclNetPlugin_v8 to v12", p.file), remedy)
        }
        (Read::Is(p), _) if p.name != "pushgate" => {
            Finding::warned("", format!("{} is the plugin `{}`, another one", p.file, p.name), remedy)
        }
        (Read::Is(p), Some(_)) => {
            let tables: Vec<_> = p.tables.iter().map(|v| format!("v{v}")).collect();
            Finding::passed("", format!("{}, tables {}", p.file, tables.join(", ")))
        }
        (Read::Is(p), None) => Finding::warned(
            "",
            format!("{} is there, but NCCL_NET_PLUGIN is not set: NCCL takes its own networks", p.file),
            "NCCL_NET_PLUGIN=pushgate NCCL_NET=pushgate",
        ),
        (Read::Absent, None) => Finding::not_applicable(
            "",
            "NCCL_NET_PLUGIN is not set, and the linker knows no libnccl-net-pushgate.so",
        ),
        (Read::Absent, Some(name)) if name.eq_ignore_ascii_case("none") => {
            Finding::not_applicable("", "NCCL_NET_PLUGIN=none: no plugin is wanted")
        }
        (Read::Absent, Some(name)) => {
            Finding::failed("", format!("NCCL_NET_PLUGIN is {name}, and there is no such library"), remedy)
        }
        (Read::Unreadable(why), _) => Finding::failed("", why, remedy),
    }];
    // docs/nccl.md: these two forget the variable after the last communicator.
    let forgets =
        n.version.is().map(|(code, _)| version(*code)).filter(|v| [(2, 28, 9), (2, 29, 7)].contains(v));
    if let (Some((major, minor, patch)), Some(_), None) =
        (forgets, variable, n.ref_count.as_deref().filter(|c| *c == "1"))
    {
        findings.push(Finding::warned(
            "",
            format!(
                "NCCL {major}.{minor}.{patch} forgets NCCL_NET_PLUGIN when the last communicator is destroyed"
            ),
            "NCCL_NET_PLUGIN_REF_COUNT=1, where a program makes another one",
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    #[test]
    fn versions_are_read_as_nccl_writes_them() {
        assert_eq!(super::version(22809), (2, 28, 9));
        assert_eq!(super::version(2804), (2, 8, 4));
        assert_eq!(super::version(0), (0, 0, 0));
        super::version(u32::MAX);
    }
}
