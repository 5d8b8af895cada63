//! `libpushgate.so` and what programs in C need beside it, in the folders of a prefix.
//!
//! rustc gives a shared library a version script of its own, beside which the linker allows no symbol versions. So the library is
//! linked here, of the archive that cargo makes of `c-api`, with `c-api/libpushgate.map`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::files::{self, put};
use crate::paths::Paths;
use crate::process;
use crate::progress::Guard;
use crate::{manual, system};

/// What installing needs.
pub const NEEDS: &[system::Need] = &[system::Need::Cxx, system::Need::Strip];

const VERSION: &str = env!("CARGO_PKG_VERSION");
const HEADER: &str = "c-api/include/pushgate/pushgate.h";

/// Headers: where they lie in the repository. They are installed to include/pushgate.
const HEADERS: &[&str] = &[
    HEADER,
    "driver-shim/include/pushgate/abi.h",
    "gpu-kernels/include/pushgate/arch.cuh",
    "gpu-kernels/include/pushgate/device.cuh",
];

/// The system's libraries that Rust's standard library calls; those that nothing calls are left out.
const LIBRARIES: &[&str] = &["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];

/// Where things are installed.
pub struct Target {
    /// The prefix as programs see it, an absolute path.
    pub prefix: PathBuf,
    /// A folder that stands for the root, where the files are put.
    pub destdir: Option<PathBuf>,
    /// The folder of libraries, below the prefix.
    pub libdir: PathBuf,
    /// What pkg-config finds names the prefix by the way from its own file, so the prefix may be moved.
    pub is_movable: bool,
}

impl Target {
    /// A file below the prefix, where it is put.
    fn at(&self, file: impl AsRef<Path>) -> PathBuf {
        let whole = self.prefix.join(file);
        match &self.destdir {
            Some(destdir) => destdir.join(whole.strip_prefix("/").unwrap_or(&whole)),
            None => whole,
        }
    }

    fn check(&self) -> Result<()> {
        ensure!(self.prefix.is_absolute(), "--prefix {}: expected an absolute path", self.prefix.display());
        let is_below = self.libdir.components().all(|part| matches!(part, Component::Normal(_)));
        ensure!(is_below, "--libdir {}: expected a path below the prefix", self.libdir.display());
        Ok(())
    }
}

/// Builds the library for this host, and installs library, headers, manual, and what pkg-config and CMake look for. Returns what was
/// put there, without manual pages.
pub fn run(paths: &Paths, target: &Target, guard: Guard) -> Result<Vec<PathBuf>> {
    put_files(paths, target, &library(paths, guard)?)
}

/// Installs as [`run`] does, with a library that was built before.
pub fn put_files(paths: &Paths, target: &Target, library: &Path) -> Result<Vec<PathBuf>> {
    target.check()?;
    let name = library.file_name().context("a library has a name")?.to_string_lossy().into_owned();
    let mut put_there = Vec::new();
    let mut place = |file: PathBuf, content: &[u8]| -> Result<PathBuf> {
        let at = target.at(file);
        // A program may have the old file open, or mapped.
        let _ = fs::remove_file(&at);
        put(&at, content)?;
        put_there.push(at.clone());
        Ok(at)
    };
    place(target.libdir.join(&name), &fs::read(library)?)?;
    for header in HEADERS {
        let name = Path::new(header).file_name().context("a header has a name")?;
        place(Path::new("include/pushgate").join(name), &fs::read(paths.root.join(header))?)?;
    }
    for (file, folder) in [
        ("pushgate.pc", "pkgconfig"),
        ("pushgateConfig.cmake", "cmake/pushgate"),
        ("pushgateConfigVersion.cmake", "cmake/pushgate"),
    ] {
        let text = filled(&files::read(&paths.root, format!("packaging/{file}.in"))?, target, &name)?;
        place(target.libdir.join(folder).join(file), text.as_bytes())?;
    }
    let link = target.at(target.libdir.join("libpushgate.so"));
    let _ = fs::remove_file(&link);
    symlink(&name, &link).with_context(|| format!("cannot make {}", link.display()))?;
    put_there.push(link);
    for (page, text) in manual::pages(&files::read(&paths.root, HEADER)?)? {
        put(&target.at("share/man/man3").join(page), text.as_bytes())?;
    }
    Ok(put_there)
}

/// Fills a template in.
fn filled(text: &str, target: &Target, library: &str) -> Result<String> {
    // From libdir/cmake/pushgate to the prefix.
    let up = vec![".."; target.libdir.components().count() + 2].join("/");
    let libdir = format!("${{prefix}}/{}", target.libdir.display());
    let prefix = match target.is_movable {
        true => format!("${{pcfiledir}}/{}", vec![".."; target.libdir.components().count() + 1].join("/")),
        false => target.prefix.display().to_string(),
    };
    let minor = VERSION.rsplit_once('.').context("a version has three numbers")?.0;
    let text = [
        ("@PREFIX@", prefix.as_str()),
        ("@LIBDIR@", &libdir),
        ("@VERSION@", VERSION),
        ("@MINOR@", minor),
        ("@LIBRARY@", library),
        ("@UP@", &up),
    ]
    .iter()
    .fold(text.to_owned(), |text, (name, value)| text.replace(name, value));
    Ok(text)
}

/// Builds the library for this host, without symbols of functions that do not leave it; returns its path.
pub fn library(paths: &Paths, guard: Guard) -> Result<PathBuf> {
    if let Some(reason) = system::unmet(NEEDS) {
        anyhow::bail!("libpushgate {reason}");
    }
    let mut cargo = process::cargo(&paths.root);
    cargo.args(["build", "--quiet", "--release", "--package", "pushgate-c"]);
    process::run_quietly(cargo, guard)?;
    let out = paths.scratch("c-api")?;
    let cc = Linker { command: process::command("cc", &out), strip: "strip".into() };
    link(paths, cc, &paths.target.join("release/libpushgate_c.a"), LIBRARIES, guard)
}

/// What links the library, and takes its symbols out.
pub struct Linker {
    pub command: Command,
    pub strip: PathBuf,
}

/// Links the library in the linker's folder, of an archive that cargo made, and takes its symbols out.
pub fn link(
    paths: &Paths,
    linker: Linker,
    archive: &Path,
    libraries: &[&str],
    guard: Guard,
) -> Result<PathBuf> {
    let Linker { command: mut linker, strip: tool } = linker;
    let out = linker.get_current_dir().context("the linker runs in a folder")?.to_path_buf();
    let map = paths.root.join("c-api/libpushgate.map");
    let name =
        format!("libpushgate.so.{}", interface(&fs::read_to_string(&map).context("cannot read the map")?)?);
    let whole = out.join("libpushgate.so.whole");
    linker.arg("-shared").arg("-o").arg(&whole);
    linker.arg(format!("-Wl,-soname,{name}"));
    linker.arg(format!("-Wl,--version-script,{}", map.display()));
    // A name in the map that nothing defines, and a call of such a name, are errors.
    linker.args(["-Wl,--no-undefined-version", "-Wl,--no-undefined", "-Wl,--as-needed"]);
    // Code that Rust's runtime has registered with the C library must not be unmapped by dlclose.
    linker.args(["-Wl,--gc-sections", "-Wl,-z,relro,-z,now,-z,nodelete"]);
    linker.arg("-Wl,--whole-archive").arg(archive).arg("-Wl,--no-whole-archive").args(libraries);
    process::run_quietly(linker, guard)?;
    let library = out.join(name);
    strip(&tool, &whole, &library, &["--strip-unneeded"], guard)?;
    Ok(library)
}

/// Writes a program or a library without its symbols and without the compiler's name.
pub fn strip(tool: &Path, from: &Path, to: &Path, how: &[&str], guard: Guard) -> Result<()> {
    let folder = to.parent().context("a file lies in a folder")?;
    let mut strip = process::command(tool, folder);
    strip.args(how).args(["--remove-section=.comment", "-o"]).arg(to).arg(from);
    process::run_quietly(strip, guard)
}

/// The interface's version, as the map names its symbols: 0.2 of PUSHGATE_0.2.
pub fn interface(map: &str) -> Result<&str> {
    let named = map.lines().find_map(|line| line.strip_prefix("PUSHGATE_")?.strip_suffix(" {"));
    named.context("c-api/libpushgate.map has no line `PUSHGATE_x.y {`")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(prefix: &str, libdir: &str, destdir: Option<&str>) -> Target {
        Target {
            prefix: prefix.into(),
            libdir: libdir.into(),
            destdir: destdir.map(PathBuf::from),
            is_movable: false,
        }
    }

    #[test]
    fn templates_know_the_prefix_and_not_the_folder_that_stands_for_the_root() {
        let usr = target("/usr", "lib/x86_64-linux-gnu", Some("/tmp/tree"));
        assert_eq!(usr.at("include/a.h"), Path::new("/tmp/tree/usr/include/a.h"));
        let text = filled("@PREFIX@ @LIBDIR@ @LIBRARY@ @UP@", &usr, "libpushgate.so.0.2").unwrap();
        assert_eq!(text, "/usr ${prefix}/lib/x86_64-linux-gnu libpushgate.so.0.2 ../../../..");
        let movable = Target { is_movable: true, ..target("/opt", "lib", None) };
        assert_eq!(filled("@PREFIX@ @LIBDIR@", &movable, "").unwrap(), "${pcfiledir}/../.. ${prefix}/lib");
    }

    #[test]
    fn a_prefix_that_is_no_absolute_path_and_libraries_outside_of_it_are_refused() {
        target("/opt/pushgate", "lib", None).check().unwrap();
        for wrong in
            [target("opt", "lib", None), target("/opt", "/lib", None), target("/opt", "../lib", None)]
        {
            wrong.check().unwrap_err();
        }
    }

    #[test]
    fn the_map_names_the_interface() {
        assert_eq!(interface("/* x */\nPUSHGATE_0.2 {\nglobal:\n").unwrap(), "0.2");
        interface("{ global: *; };").unwrap_err();
    }
}
