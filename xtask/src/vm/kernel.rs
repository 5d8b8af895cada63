//! The guest's kernel: Debian's package, fetched by apt and unpacked below the target folder.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};

use crate::output::say;
use crate::paths::Paths;
use crate::process::{self, Redirect};
use crate::progress::Guard;
use crate::system;

/// An unpacked kernel package.
pub struct Kernel {
    /// The folder in which it is unpacked.
    pub dir: PathBuf,
    /// The kernel's release, as in /lib/modules.
    pub release: String,
    /// The dependencies of each module, as depmod found them: path to paths, below the modules'
    /// folder.
    dependencies: HashMap<String, Vec<String>>,
}

/// Why no kernel can be fetched on this system; `None` on Debian 12.
pub fn unavailable() -> Option<String> {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let has = |wanted: &str| release.lines().any(|line| line.replace('"', "") == wanted);
    let is_fit = has("ID=debian") && has("VERSION_ID=12") && cfg!(target_arch = "x86_64");
    (!is_fit).then(|| "the virtual machine's kernel is Debian 12's for amd64, fetched by apt".into())
}

/// Returns the kernel of the wanted release, or the newest that apt knows; from the cache if it is
/// there. If no release is wanted and apt can't help, an older kernel in the cache serves.
pub fn get(paths: &Paths, wanted: Option<&str>, guard: Guard) -> Result<Kernel> {
    // The guest knows the folder by the resolved name.
    let cache = paths.scratch("vm")?.canonicalize()?;
    let fetched = match wanted {
        Some(release) => unpacked(&cache, release.into(), guard).with_context(|| {
            format!(
                "no kernel {release}: is a part of Debian that has linux-image-{release} among apt's sources?"
            )
        }),
        None => fetch(&cache, guard),
    };
    let release = match fetched {
        Ok(release) => release,
        Err(error) if wanted.is_some() => return Err(error),
        Err(error) => {
            let old = newest_cached(&cache).with_context(|| format!("no kernel for the guest: {error:#}"))?;
            say!("no newer kernel than {old}: {error:#}");
            old
        }
    };
    let dir = folder(&cache, &release);
    let text = fs::read_to_string(dir.join("lib/modules").join(&release).join("modules.dep"))?;
    Ok(Kernel { dependencies: parse_dependencies(&text)?, dir, release })
}

impl Kernel {
    /// The path of the kernel image.
    pub fn image(&self) -> PathBuf {
        self.dir.join("boot").join(format!("vmlinux-{}", self.release))
    }

    /// The version of Debian's package that the kernel was built from, as its image says.
    pub fn version(&self) -> Result<String> {
        let file = self.image();
        let image = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        version_in(&image, &self.release)
            .with_context(|| format!("{} does not say its package's version", file.display()))
    }

    /// The files of the named modules and of all that they depend on, in an order in which they
    /// load.
    pub fn modules(&self, names: &[&str]) -> Result<Vec<PathBuf>> {
        let folder = self.dir.join("lib/modules").join(&self.release);
        let builtin = fs::read_to_string(folder.join("modules.builtin")).unwrap_or_default();
        let builtin: Vec<_> = builtin.lines().map(module_name).collect();
        let files = closure(&self.dependencies, &builtin, names)?;
        Ok(files.iter().map(|file| folder.join(file)).collect())
    }
}

/// The version in a kernel's banner: `Linux version RELEASE ... Debian VERSION (DATE)`.
fn version_in(image: &[u8], release: &str) -> Option<String> {
    let banner = format!("Linux version {release} (");
    let start = memmem(image, banner.as_bytes())?;
    let line = &image[start..];
    let line = &line[..line.iter().position(|byte| [0, b'\n'].contains(byte))?];
    let (_, version) = std::str::from_utf8(line).ok()?.rsplit_once(" Debian ")?;
    version.split_whitespace().next().map(str::to_string)
}

fn memmem(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

/// The content of a module, decompressed.
pub fn read_module(file: &Path) -> Result<Vec<u8>> {
    if file.extension() != Some(OsStr::new("xz")) {
        return fs::read(file).with_context(|| format!("cannot read {}", file.display()));
    }
    let output = Command::new("xz").arg("-dc").arg(file).output().context("cannot start xz")?;
    ensure!(output.status.success(), "xz cannot unpack {}", file.display());
    Ok(output.stdout)
}

/// The name of the module in a file: dashes become underscores.
pub fn module_name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split('.').next().unwrap_or(name).replace('-', "_")
}

fn folder(cache: &Path, release: &str) -> PathBuf {
    cache.join(format!("kernel-{release}"))
}

/// Makes sure that the newest kernel is in the cache; returns its release.
fn fetch(cache: &Path, guard: Guard) -> Result<String> {
    // apt may know no kernel before the first update, or one that is gone from the archive.
    let first = newest_known().and_then(|release| unpacked(cache, release, guard));
    if first.is_ok() || !rustix::process::geteuid().is_root() {
        return first;
    }
    let mut update = process::command("apt-get", cache);
    update.arg("update");
    process::run(update, guard)?;
    unpacked(cache, newest_known()?, guard)
}

/// The release of the newest kernel in apt's lists.
fn newest_known() -> Result<String> {
    let output = Command::new("apt-cache").args(["depends", "linux-image-amd64"]).output();
    let output = output.context("cannot start apt-cache")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let package = text.lines().find_map(|line| line.trim().strip_prefix("Depends: linux-image-"));
    Ok(package.context("apt knows no package linux-image-amd64; run: sudo apt-get update")?.into())
}

fn newest_cached(cache: &Path) -> Option<String> {
    let name = |file: fs::DirEntry| Some(file.file_name().to_str()?.strip_prefix("kernel-")?.to_string());
    // Compare numbers: 6.1.0-9 is older than 6.1.0-10.
    let numbers = |release: &String| -> Vec<u32> {
        release.split(['.', '-']).map(|number| number.parse().unwrap_or(0)).collect()
    };
    fs::read_dir(cache).ok()?.flatten().filter_map(name).max_by_key(numbers)
}

/// Fetches and unpacks a kernel unless that has been done already.
fn unpacked(cache: &Path, release: String, guard: Guard) -> Result<String> {
    let dir = folder(cache, &release);
    made(cache, &dir, |part| fetch_into(part, &release, guard))?;
    Ok(release)
}

/// Makes a folder of the cache unless it exists, from what `make` leaves in `tree` below its own
/// folder.
pub fn made(cache: &Path, dir: &Path, make: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    if dir.exists() {
        return Ok(());
    }
    // The folder has another name until it is whole. If two processes do this at once, the first to
    // finish wins.
    let name = dir.file_name().context("a folder has a name")?.to_string_lossy();
    let part = cache.join(format!("part-{}-{name}", std::process::id()));
    let tree = part.join("tree");
    fs::create_dir_all(&tree).with_context(|| format!("cannot make {}", tree.display()))?;
    let result = make(&part);
    if result.is_ok() && fs::rename(tree, dir).is_err() && !dir.exists() {
        bail!("cannot make {}", dir.display());
    }
    let _ = fs::remove_dir_all(&part);
    result
}

/// What builds modules for a kernel: Debian's packages, unpacked in the cache.
pub fn headers(paths: &Paths, kernel: &Kernel, guard: Guard) -> Result<PathBuf> {
    let cache = paths.scratch("vm")?.canonicalize()?;
    let release = &kernel.release;
    let dir = cache.join(format!("headers-{release}"));
    made(&cache, &dir, |part| fetch_headers(part, release, guard))
        .with_context(|| format!("no headers of the guest's kernel {release}"))?;
    Ok(dir)
}

fn fetch_headers(part: &Path, release: &str, guard: Guard) -> Result<()> {
    let main = format!("linux-headers-{release}");
    let output = Command::new("apt-cache").args(["depends", &main]).output();
    let text = String::from_utf8_lossy(&output.context("cannot start apt-cache")?.stdout).into_owned();
    let needed = text.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    let mut packages: Vec<_> = needed
        .filter(|name| name.starts_with("linux-headers-") || name.starts_with("linux-kbuild-"))
        .map(str::to_string)
        .collect();
    ensure!(packages.len() == 2, "apt knows no package {main}; run: sudo apt-get update");
    packages.push(main.clone());
    download(part, &packages, guard)?;
    make_movable(&part.join("tree/usr/src").join(&main))
}

/// Changes the only absolute path in unpacked headers; their links are relative.
pub fn make_movable(headers: &Path) -> Result<()> {
    let makefile = headers.join("Makefile");
    let text = fs::read_to_string(&makefile)?;
    let here = text.replace("include /usr/src/", "include $(dir $(lastword $(MAKEFILE_LIST)))../");
    ensure!(here != text, "{} does not include what it did in Debian 12", makefile.display());
    Ok(fs::write(&makefile, here)?)
}

/// Fetches packages into a folder and unpacks them into its `tree`.
pub fn download(part: &Path, packages: &[String], guard: Guard) -> Result<()> {
    for package in fetch_packages(part, packages, guard)? {
        let mut unpack = process::command("dpkg-deb", part);
        unpack.arg("-x").arg(package).arg(part.join("tree"));
        process::run(unpack, guard)?;
    }
    Ok(())
}

/// Fetches packages (`name`, or `name=version`) into a folder; returns their files.
pub fn fetch_packages(part: &Path, packages: &[String], guard: Guard) -> Result<Vec<PathBuf>> {
    let mut download = process::command("apt-get", part);
    // Run as root, apt downloads as another user, who may not write here, and prints a warning.
    if rustix::process::geteuid().is_root() {
        download.args(["-o", "APT::Sandbox::User=root"]);
    }
    download.arg("download").args(packages);
    process::run(download, guard)?;
    let files = fs::read_dir(part)?.flatten().map(|file| file.path());
    let found: Vec<_> = files.filter(|path| path.extension() == Some(OsStr::new("deb"))).collect();
    ensure!(found.len() == packages.len(), "apt-get has downloaded {} of {packages:?}", found.len());
    Ok(found)
}

fn fetch_into(part: &Path, release: &str, guard: Guard) -> Result<()> {
    let tree = part.join("tree");
    download(part, &[format!("linux-image-{release}")], guard)?;
    // Decompressed here once, because the guest would take 6 s for it at every boot. QEMU boots it
    // as it is (PVH).
    let boot = tree.join("boot");
    let packed = part.join("kernel.packed");
    let image = fs::read(boot.join(format!("vmlinuz-{release}")))?;
    let (unpacker, content) = payload(&image)?;
    ensure!(
        system::find_program(unpacker).is_some(),
        "the kernel {release} is compressed with {unpacker}, which is not here; get it by apt"
    );
    fs::write(&packed, content)?;
    let mut unpack = process::command(unpacker, part);
    unpack.arg("-dc").arg(&packed);
    let image = fs::File::create(boot.join(format!("vmlinux-{release}")))?;
    process::run_redirected(unpack, Redirect { stdout: Some(image), ..Redirect::default() }, guard)?;
    // Debian's package leaves this to its installation. depmod also writes the aliases by which the
    // kernel asks for modules.
    let mut depmod = process::command(system::find_program("depmod").context("no depmod")?, part);
    depmod.arg("-b").arg(&tree).arg(release);
    process::run(depmod, guard)
}

/// The compressed kernel in an image, and the program that unpacks it. The header of the boot
/// protocol says where it lies.
fn payload(image: &[u8]) -> Result<(&'static str, &[u8])> {
    let number = |at: usize| {
        let bytes = image.get(at..at + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?) as usize)
    };
    ensure!(image.get(0x202..0x206) == Some(b"HdrS"), "the kernel's image has no header");
    // Sectors of the part in real mode, less the first; then offset and length after them. The last
    // four bytes are the unpacked length.
    let start = (usize::from(image[0x1f1]) + 1) * 512;
    let find = || image.get(start + number(0x248)?..)?.get(..number(0x24c)?.checked_sub(4)?);
    let payload = find().context("the kernel's image is cut short")?;
    // Debian 12's own kernel uses the first, its backports the second.
    let formats: [(&str, &[u8]); 2] = [("xz", b"\xfd7zXZ\0"), ("zstd", b"\x28\xb5\x2f\xfd")];
    let known = formats.into_iter().find(|(_, magic)| payload.starts_with(magic));
    let (unpacker, _) = known.context("the kernel is compressed with neither xz nor zstd")?;
    Ok((unpacker, payload))
}

fn parse_dependencies(text: &str) -> Result<HashMap<String, Vec<String>>> {
    let parse = |line: &str| {
        let (file, needs) = line.split_once(':')?;
        Some((file.to_string(), needs.split_whitespace().map(str::to_string).collect()))
    };
    text.lines().map(|line| parse(line).with_context(|| format!("modules.dep has a line {line:?}"))).collect()
}

/// The named modules and all that they depend on, each once and after its dependencies.
fn closure(
    dependencies: &HashMap<String, Vec<String>>,
    builtin: &[String],
    names: &[&str],
) -> Result<Vec<String>> {
    fn add(file: &str, dependencies: &HashMap<String, Vec<String>>, order: &mut Vec<String>) {
        if order.iter().any(|known| known == file) {
            return;
        }
        for needed in dependencies.get(file).into_iter().flatten() {
            add(needed, dependencies, order);
        }
        order.push(file.to_string());
    }
    let files: HashMap<_, _> = dependencies.keys().map(|file| (module_name(file), file)).collect();
    let mut order = Vec::new();
    for name in names {
        match files.get(&module_name(name)) {
            Some(file) => add(file, dependencies, &mut order),
            None if builtin.contains(&module_name(name)) => (),
            None => bail!("the kernel has no module {name}"),
        }
    }
    Ok(order)
}

/// The folder of cargo's programs of the user who runs this.
pub fn cargo_bin() -> PathBuf {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    home.unwrap_or_else(|| Path::new(&env::var_os("HOME").unwrap_or_default()).join(".cargo")).join("bin")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODULES: &str = "\
kernel/a/rdma_rxe.ko.xz: kernel/b/ib-core.ko kernel/c/tunnel.ko
kernel/b/ib-core.ko: kernel/d/base.ko
kernel/c/tunnel.ko:
kernel/d/base.ko:
kernel/e/other.ko: kernel/d/base.ko
";

    #[test]
    fn what_a_module_needs_comes_before_it() {
        let dependencies = parse_dependencies(MODULES).unwrap();
        let builtin = ["ipv6".to_string()];
        let order = closure(&dependencies, &builtin, &["rdma-rxe", "ib_core", "ipv6"]).unwrap();
        let order: Vec<_> = order.iter().map(|file| module_name(file)).collect();
        assert_eq!(order, ["base", "ib_core", "tunnel", "rdma_rxe"]);
    }

    #[test]
    fn the_payload_is_where_the_header_says() {
        let mut image = vec![0; 2048];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&14_u32.to_le_bytes());
        image[1040..1054].copy_from_slice(b"\xfd7zXZ\0packSIZE");
        assert_eq!(payload(&image).unwrap(), ("xz", b"\xfd7zXZ\0pack".as_slice()));
        payload(&image[..1049]).unwrap_err();
        payload(&[0; 2048]).unwrap_err();
        payload(&[]).unwrap_err();
    }

    #[test]
    fn the_version_is_the_banners() {
        let image = b"\0Linux version %s\0Linux version 6.1.0-9-amd64 (x@debian.org) (gcc-12) #1 SMP Debian 6.1.192-2 (2026-01-02)\n\0";
        assert_eq!(version_in(image, "6.1.0-9-amd64").unwrap(), "6.1.192-2");
        assert_eq!(version_in(image, "6.1.0-10-amd64"), None);
        assert_eq!(version_in(&image[..60], "6.1.0-9-amd64"), None);
    }

    #[test]
    fn a_module_that_is_not_there_is_named() {
        let dependencies = parse_dependencies(MODULES).unwrap();
        let error = closure(&dependencies, &[], &["siw"]).unwrap_err().to_string();
        assert!(error.contains("siw"), "{error}");
        parse_dependencies("no colon").unwrap_err();
    }
}
