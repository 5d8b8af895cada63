//! The kernel module `pushgate`, and its device files.

use pushgate_driver_shim::{kmod::Device, uapi};

use super::files::{names, text};
use super::roots::Roots;
use crate::readings::{Module, Read};

pub fn module(roots: &Roots) -> Module {
    let folder = roots.sys.join("module/pushgate");
    let version = match text(&folder.join("version")) {
        Read::Absent if folder.exists() => Read::Unreadable(format!("{} has no version", folder.display())),
        read => read,
    };
    let is_ours =
        |name: &String| name.strip_prefix("pushgate").is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()));
    let ours = names(&roots.dev).into_iter().filter(is_ours);
    let open = |name: String| {
        let path = roots.dev.join(name);
        let info = match roots.live {
            true => Device::open(&path).and_then(|device| device.info()).map_err(|e| e.to_string()),
            false => Err(format!("{} was not opened: it is no device of this host", path.display())),
        };
        let told = info.map(|i| (i.version, i.features & u64::from(uapi::PUSHGATE_FEATURE_SLICE) != 0));
        (path.display().to_string(), told)
    };
    Module { version, devices: ours.map(open).collect() }
}
