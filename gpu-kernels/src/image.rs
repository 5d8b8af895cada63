//! Kernels that were compiled before: cubins, fatbins and PTX for GPUs, shared libraries for this CPU. The form is found by what
//! the bytes say, and every size and place in them is checked: the driver is handed no length.

use std::fmt;
use std::path::Path;

use pushgate_driver_shim::file::read_bytes;

use crate::error::{DeviceError, Result};

/// The longest image, bytes.
const LONGEST: u64 = 1 << 30;

const ELF: &[u8] = b"\x7fELF";
const EM_X86_64: u16 = 62;
const EM_AARCH64: u16 = 183;
const EM_CUDA: u16 = 190;
/// The machine of this program.
const HERE: u16 = if cfg!(target_arch = "aarch64") { EM_AARCH64 } else { EM_X86_64 };
/// A shared object.
const ET_DYN: u16 = 3;
const SHT_NOBITS: u32 = 8;
const SHT_DYNSYM: u32 = 11;
/// From this version of the ABI on, the architecture lies in other bits of the flags.
const CUDA_ABI_V2: u8 = 8;

const FATBIN: u32 = 0xba55_ed50;
const FATBIN_PTX: u16 = 1;
const FATBIN_ELF: u16 = 2;

/// Compiled kernels, for GPUs or for this CPU. See [`Image::bytes`].
#[derive(Clone)]
pub struct Image {
    name: String,
    bytes: Vec<u8>,
    targets: Vec<Target>,
    kernels: Vec<String>,
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Image { name, bytes, targets, kernels } = self;
        let mut debug = f.debug_struct("Image");
        debug.field("name", name).field("bytes", &bytes.len()).field("targets", targets);
        debug.field("kernels", kernels).finish()
    }
}

/// What runs a part of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Target {
    /// Machine code for GPUs of a compute capability: 90 for sm_90.
    Gpu {
        /// Ten times the major number, and the minor number.
        sm: u32,
        /// For that capability alone (sm_90a).
        exactly: bool,
    },
    /// PTX, which the driver compiles for GPUs of this capability or a later one.
    Ptx {
        /// The compute capability as a number, as of `Gpu`.
        sm: u32,
        /// For that capability alone (sm_90a), or for its family (sm_100f).
        exactly: bool,
    },
    /// A shared library for a processor, by its number in ELF.
    Cpu {
        /// `e_machine`.
        machine: u16,
    },
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let alone = |exactly: bool| if exactly { "a" } else { "" };
        match *self {
            Target::Gpu { sm, exactly } => write!(f, "sm_{sm}{}", alone(exactly)),
            Target::Ptx { sm, exactly } => write!(f, "PTX of sm_{sm}{}", alone(exactly)),
            Target::Cpu { machine: EM_X86_64 } => f.write_str("x86-64 CPUs"),
            Target::Cpu { machine: EM_AARCH64 } => f.write_str("AArch64 CPUs"),
            Target::Cpu { machine } => write!(f, "CPUs of ELF machine {machine}"),
        }
    }
}

impl Target {
    /// Whether a GPU of compute capability `sm` can run it, as far as the numbers say.
    fn runs_on(self, sm: u32) -> bool {
        match self {
            Target::Gpu { sm: own, exactly: true } | Target::Ptx { sm: own, exactly: true } => own == sm,
            // Machine code runs on later GPUs of the same major number.
            Target::Gpu { sm: own, exactly: false } => own / 10 == sm / 10 && own <= sm,
            Target::Ptx { sm: own, exactly: false } => own <= sm,
            Target::Cpu { .. } => false,
        }
    }
}

impl Image {
    /// Takes a cubin, a fatbin or PTX (nvcc's `-cubin`, `-fatbin`, `-ptx`), or, for the device `cpu`, a shared library that a C++
    /// compiler made. Errors call the image `name`.
    ///
    /// The kernels are those of a source for [`Source`](crate::Source), compiled with the headers of this release: their
    /// structures are those of the library's queue pairs.
    pub fn bytes(name: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Result<Self> {
        let (name, bytes) = (name.into(), bytes.into());
        match parse(&bytes) {
            Ok((targets, mut kernels)) => {
                kernels.sort();
                kernels.dedup();
                Ok(Image { name, bytes, targets, kernels })
            }
            Err(why) => Err(DeviceError::Image { image: name, why }),
        }
    }

    /// Reads an image from a file now.
    pub fn path(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = read_bytes(path, LONGEST).map_err(|source| DeviceError::Io {
            what: "read the image",
            path: path.to_owned(),
            source,
        })?;
        Self::bytes(path.display().to_string(), bytes)
    }

    /// The name that errors use for the image.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the image is for; a fatbin may be for several.
    pub fn targets(&self) -> &[Target] {
        &self.targets
    }

    /// The kernels that the image says by name. Those of compressed parts of a fatbin are found when they are launched.
    pub fn kernels(&self) -> &[String] {
        &self.kernels
    }

    pub(crate) fn contents(&self) -> &[u8] {
        &self.bytes
    }

    fn told(&self) -> String {
        let all: Vec<String> = self.targets.iter().map(Target::to_string).collect();
        all.join(", ")
    }

    /// Refuses an image that holds nothing for a GPU of compute capability `sm`.
    pub(crate) fn check_gpu(&self, sm: u32) -> Result<()> {
        if self.targets.iter().any(|target| target.runs_on(sm)) {
            return Ok(());
        }
        Err(DeviceError::ImageTarget {
            image: self.name.clone(),
            is_for: self.told(),
            device: format!("this GPU is sm_{sm}"),
            remedy: format!("compile with -arch=sm_{sm}, or make a fatbin that has PTX (-arch=all-major)"),
        })
    }

    /// Refuses an image that is no library for this CPU.
    pub(crate) fn check_cpu(&self) -> Result<()> {
        if self.targets == [Target::Cpu { machine: HERE }] {
            return Ok(());
        }
        Err(DeviceError::ImageTarget {
            image: self.name.clone(),
            is_for: self.told(),
            device: format!("the device `cpu` takes a shared library for {}", Target::Cpu { machine: HERE }),
            remedy: "compile the source with -x c++ -std=c++17 -shared -fPIC, or run with the device `cuda`"
                .into(),
        })
    }
}

type Parsed = std::result::Result<(Vec<Target>, Vec<String>), String>;

fn parse(bytes: &[u8]) -> Parsed {
    match bytes {
        [] => Err("it is empty".into()),
        _ if bytes.starts_with(ELF) => elf(bytes),
        _ if word(bytes, 0) == Some(FATBIN) => fatbin(bytes),
        _ => ptx(bytes),
    }
}

fn at<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..)?.first_chunk().copied()
}

fn half(bytes: &[u8], offset: usize) -> Option<u16> {
    at(bytes, offset).map(u16::from_le_bytes)
}

fn word(bytes: &[u8], offset: usize) -> Option<u32> {
    at(bytes, offset).map(u32::from_le_bytes)
}

fn long(bytes: &[u8], offset: usize) -> Option<u64> {
    at(bytes, offset).map(u64::from_le_bytes)
}

/// The bytes of a range that an image names.
fn range(bytes: &[u8], offset: u64, length: u64) -> Option<&[u8]> {
    let end = offset.checked_add(length)?;
    bytes.get(usize::try_from(offset).ok()?..usize::try_from(end).ok()?)
}

/// A name in a table of strings.
fn string(table: &[u8], offset: u32) -> Option<&str> {
    let text = table.get(offset as usize..)?;
    std::str::from_utf8(text.split(|byte| *byte == 0).next()?).ok()
}

/// A section of an ELF file.
struct Section<'a> {
    name: u32,
    kind: u32,
    link: u32,
    contents: &'a [u8],
}

/// The sections of an ELF file, all of which lie within it.
fn sections(bytes: &[u8]) -> std::result::Result<Vec<Section<'_>>, String> {
    let cut = |what: &str| {
        format!("its {what} lie beyond its {} bytes: the file is cut off or damaged", bytes.len())
    };
    let header = || Some((long(bytes, 0x20)?, half(bytes, 0x36)?, half(bytes, 0x38)?));
    let (offset, each, count) = header().ok_or_else(|| cut("ELF header"))?;
    range(bytes, offset, u64::from(each) * u64::from(count)).ok_or_else(|| cut("program headers"))?;
    for n in 0..u64::from(count) {
        let start = offset + n * u64::from(each);
        let program = range(bytes, start, 56).ok_or_else(|| cut("program headers"))?;
        let segment = long(program, 8).zip(long(program, 32));
        segment.and_then(|(offset, size)| range(bytes, offset, size)).ok_or_else(|| cut("segments"))?;
    }
    let header = || Some((long(bytes, 0x28)?, half(bytes, 0x3a)?, half(bytes, 0x3c)?));
    let (offset, each, count) = header().ok_or_else(|| cut("ELF header"))?;
    let mut all = Vec::new();
    for n in 0..u64::from(count) {
        let section = || {
            let entry = range(bytes, offset.checked_add(n * u64::from(each))?, 64)?;
            let (kind, offset, size) = (word(entry, 4)?, long(entry, 24)?, long(entry, 32)?);
            let contents = if kind == SHT_NOBITS { &[][..] } else { range(bytes, offset, size)? };
            Some(Section { name: word(entry, 0)?, kind, link: word(entry, 40)?, contents })
        };
        all.push(section().ok_or_else(|| cut("sections"))?);
    }
    Ok(all)
}

fn elf(bytes: &[u8]) -> Parsed {
    if bytes.get(4..6) != Some(&[2, 1]) {
        return Err("it is an ELF file of 32 bits or of another byte order".into());
    }
    let header = || Some((half(bytes, 0x10)?, half(bytes, 0x12)?, word(bytes, 0x30)?, half(bytes, 0x3e)?));
    let (kind, machine, flags, names) =
        header().ok_or("it is an ELF file of less than a header: the file is cut off")?;
    let sections = sections(bytes)?;
    let names = sections.get(usize::from(names)).map_or(&[][..], |section| section.contents);
    if machine == EM_CUDA {
        let (sm, exactly) = match bytes[8] >= CUDA_ABI_V2 {
            true => (flags >> 8 & 0xff, flags & 0x8 != 0),
            false => (flags & 0xff, flags & 0x800 != 0),
        };
        // Each kernel has its parameters in a bank of its own.
        let kernel =
            |s: &Section<'_>| Some(string(names, s.name)?.strip_prefix(".nv.constant0.")?.to_owned());
        let kernels = sections.iter().filter_map(kernel).collect();
        return Ok((vec![Target::Gpu { sm, exactly }], kernels));
    }
    if kind != ET_DYN {
        return Err(
            "it is an object file or a program, not a cubin and not a shared library: link it with -shared"
                .into(),
        );
    }
    // PUSHGATE_KERNEL(NAME, ..) makes NAME_params_size beside NAME.
    let mut kernels = Vec::new();
    for symbols in sections.iter().filter(|section| section.kind == SHT_DYNSYM) {
        let strings = sections.get(symbols.link as usize).map_or(&[][..], |section| section.contents);
        for symbol in symbols.contents.as_chunks::<24>().0 {
            let name = word(symbol, 0).and_then(|name| string(strings, name));
            // Undefined symbols are another library's.
            let defined = half(symbol, 6).is_some_and(|section| section != 0);
            if let Some(kernel) = name.and_then(|name| name.strip_suffix("_params_size")).filter(|_| defined)
            {
                kernels.push(kernel.to_owned());
            }
        }
    }
    if machine == HERE && kernels.is_empty() {
        return Err(
            "it is a shared library without a PUSHGATE_KERNEL: compile a source over pushgate/device.cuh"
                .into(),
        );
    }
    Ok((vec![Target::Cpu { machine }], kernels))
}

fn fatbin(bytes: &[u8]) -> Parsed {
    let cut = || {
        format!(
            "it is a fatbin whose parts lie beyond its {} bytes: the file is cut off or damaged",
            bytes.len()
        )
    };
    let header = half(bytes, 6).zip(long(bytes, 8)).ok_or_else(cut)?;
    let mut rest = range(bytes, header.0.into(), header.1).ok_or_else(cut)?;
    let (mut targets, mut kernels) = (Vec::new(), Vec::new());
    while !rest.is_empty() {
        let entry =
            || Some((half(rest, 0)?, word(rest, 4)?, long(rest, 8)?, word(rest, 16)?, word(rest, 28)?));
        let (kind, header, size, compressed, sm) = entry().ok_or_else(cut)?;
        if header < 32 {
            return Err(format!(
                "it is a fatbin with a part whose header has {header} bytes, expected 32 or more"
            ));
        }
        let body = range(rest, header.into(), size).ok_or_else(cut)?;
        // What is not compressed says more than the entry: whether it is for that capability alone.
        let told = match (kind, compressed) {
            (FATBIN_ELF, 0) if body.starts_with(ELF) => Some(elf(body)?),
            (FATBIN_PTX, 0) => ptx(body).ok(),
            _ => None,
        };
        match (told, kind) {
            (Some((found, names)), _) => {
                targets.extend(found);
                kernels.extend(names);
            }
            (None, FATBIN_ELF) => targets.push(Target::Gpu { sm, exactly: false }),
            (None, FATBIN_PTX) => targets.push(Target::Ptx { sm, exactly: false }),
            // A kind of a later compiler.
            (None, _) => {}
        }
        let next = u64::from(header).checked_add(size).and_then(|next| usize::try_from(next).ok());
        rest = next.and_then(|next| rest.get(next..)).ok_or_else(cut)?;
    }
    match targets.is_empty() {
        true => Err("it is a fatbin without code".into()),
        false => Ok((targets, kernels)),
    }
}

fn ptx(bytes: &[u8]) -> Parsed {
    let other = "it is no cubin, fatbin, PTX or shared library (nvcc makes the first three with -cubin, -fatbin, -ptx)";
    // The driver reads to the first zero byte.
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    let text = std::str::from_utf8(text).map_err(|_| other)?;
    let lines = || text.lines().map(|line| line.split("//").next().unwrap_or_default().trim());
    let mut said = lines().filter(|line| !line.is_empty());
    if !said.next().is_some_and(|line| line.starts_with(".version")) {
        return Err(other.into());
    }
    let target =
        lines().find_map(|line| line.strip_prefix(".target")).ok_or("it is PTX without a .target")?;
    let target = target.trim().split(',').next().unwrap_or_default().trim();
    let number = target.strip_prefix("sm_").unwrap_or_default();
    let digits = number.trim_end_matches(['a', 'f']);
    let sm = digits.parse().map_err(|_| format!("it is PTX for `{target}`, expected sm_ and a number"))?;
    let entry = |line: &str| {
        let rest = line.split(".entry").nth(1)?.trim_start();
        let name = rest.split(|c: char| !(c.is_ascii_alphanumeric() || "_$%".contains(c))).next()?;
        (!name.is_empty()).then(|| name.to_owned())
    };
    Ok((vec![Target::Ptx { sm, exactly: digits != number }], lines().filter_map(entry).collect()))
}

#[cfg(test)]
mod tests;
