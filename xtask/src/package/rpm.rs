//! The RPM package, which rpmbuild makes of `packaging/pushgate.spec`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::natives::Natives;
use super::tree::{Layout, Tree, files, links};
use super::{Arch, VERSION, epoch};
use crate::paths::Paths;
use crate::process;
use crate::progress::Guard;
use crate::system::Need;

/// What making the package needs.
pub const NEEDS: &[Need] = &[Need::Strip, Need::Python, Need::Manual, Need::Rpm];

/// Fedora's and RHEL's places.
const LAYOUT: Layout<'static> = Layout {
    libdir: "lib64",
    units: "lib/systemd/user",
    zsh: "share/zsh/site-functions",
    prefix: Some("/usr"),
};

/// Folders, below /usr, that every distribution has. The package owns all other folders that it puts files into, so that none of
/// them stays behind.
const NOT_OWNED: &[&str] = &[
    "bin",
    "include",
    "lib",
    "lib/systemd",
    "lib/systemd/system",
    "lib/udev",
    "lib/udev/rules.d",
    "lib64",
    "share",
    "share/doc",
    "share/man",
    "share/man/man1",
    "share/man/man3",
    "src",
];

/// Makes the package; returns its path.
pub fn build(paths: &Paths, natives: &Natives, guard: Guard) -> Result<PathBuf> {
    let out = paths.scratch("package")?;
    let whole = out.join("rpm-tree");
    if whole.exists() {
        fs::remove_dir_all(&whole).with_context(|| format!("cannot remove {}", whole.display()))?;
    }
    let tree = Tree { paths, out: out.clone(), root: whole.join("usr"), guard };
    tree.fill(&LAYOUT, natives)?;
    let list = out.join("rpm-files");
    fs::write(&list, contents(&tree.root)?)?;
    let top = out.join("rpmbuild");
    fs::create_dir_all(&top)?;
    let mut rpmbuild = process::command("rpmbuild", &out);
    rpmbuild.arg("-bb").arg("--quiet");
    if natives.arch != Arch::HOST {
        rpmbuild.arg("--target").arg(natives.arch.name());
    }
    for (name, value) in [
        ("_topdir", top.display().to_string()),
        ("_rpmdir", out.display().to_string()),
        ("_rpmfilename", "%{name}-%{version}-%{release}.%{arch}.rpm".into()),
        ("pushgate_version", VERSION.into()),
        ("pushgate_arch", natives.arch.name().into()),
        ("pushgate_tree", whole.display().to_string()),
        ("pushgate_files", list.display().to_string()),
        // Makes two builds of the same sources alike.
        ("_buildhost", "localhost".into()),
        ("use_source_date_epoch_as_buildtime", "1".into()),
        ("clamp_mtime_to_source_date_epoch", "1".into()),
    ] {
        rpmbuild.arg("--define").arg(format!("{name} {value}"));
    }
    rpmbuild.arg(paths.root.join("packaging/pushgate.spec"));
    rpmbuild.env("SOURCE_DATE_EPOCH", epoch(paths, guard)?);
    process::run_quietly(rpmbuild, guard)?;
    let package = out.join(format!("pushgate-{VERSION}-1.{}.rpm", natives.arch.name()));
    ensure!(package.is_file(), "rpmbuild has not made {}", package.display());
    Ok(package)
}

/// The list for `%files`: every file and link, and the folders that the package owns.
fn contents(usr: &Path) -> Result<String> {
    let mut names: BTreeSet<String> = files(usr)?.into_iter().map(|(name, _)| name).collect();
    names.extend(links(usr)?.into_iter().map(|(name, _)| name));
    let mut lines = BTreeSet::new();
    for name in &names {
        for folder in Path::new(name).ancestors().skip(1) {
            let folder = folder.to_str().context("a name is no UTF-8")?;
            if !folder.is_empty() && !NOT_OWNED.contains(&folder) {
                lines.insert(format!("%dir %attr(0755,root,root) \"/usr/{folder}\""));
            }
        }
        let mode = if name.starts_with("bin/") { "%attr(0755,root,root)" } else { "%attr(-,root,root)" };
        let kind = if name.starts_with("share/doc/") { "%doc " } else { "" };
        lines.insert(format!("{kind}{mode} \"/usr/{name}\""));
    }
    Ok(lines.into_iter().collect::<Vec<_>>().join("\n") + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::put;

    #[test]
    fn folders_of_the_package_alone_are_owned() {
        let usr = std::env::temp_dir().join(format!("xtask-rpm-{}", std::process::id()));
        put(&usr.join("bin/pushgate"), b"").unwrap();
        put(&usr.join("include/pushgate/a.h"), b"").unwrap();
        let text = contents(&usr).unwrap();
        fs::remove_dir_all(&usr).unwrap();
        assert_eq!(
            text,
            "%attr(-,root,root) \"/usr/include/pushgate/a.h\"\n%attr(0755,root,root) \"/usr/bin/pushgate\"\n\
             %dir %attr(0755,root,root) \"/usr/include/pushgate\"\n"
        );
    }
}
