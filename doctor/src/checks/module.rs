//! The kernel module `pushgate`.

use pushgate_driver_shim::uapi;

use crate::finding::Finding;
use crate::readings::{Read, Readings, Window};

/// The module of this release, and devices that this user may open: /dev/pushgate for a staging
/// window, /dev/pushgateN with a window for one in a BAR. A memory window needs none of it.
pub fn module(r: &Readings) -> Vec<Finding> {
    let wants = match r.wants.window {
        Window::Memory => None,
        Window::Staging => Some("window = staging"),
        Window::Bar => Some("window = bar"),
    };
    // What nobody needs is no failure.
    let worse = |subject: &str, reading: String, remedy: &str| match wants {
        Some(wants) => Finding::failed(subject, format!("{reading}, and {wants} needs it"), remedy),
        None => Finding::warned(subject, reading, remedy),
    };
    let load =
        "sudo modprobe pushgate; install it first by the package (docs/driver.md), or set window to memory";
    let version = match &r.module.version {
        Read::Is(version) => version,
        Read::Absent => {
            return vec![match wants {
                Some(_) => worse("", "the module pushgate is not loaded".into(), load),
                None => Finding::not_applicable(
                    "",
                    "the module pushgate is not loaded; window = memory needs none",
                ),
            }];
        }
        Read::Unreadable(why) => return vec![Finding::warned("", why, "look with modinfo pushgate")],
    };
    let ours = env!("CARGO_PKG_VERSION");
    let mut findings = vec![match version == ours {
        true => Finding::passed("", format!("version {version} is loaded, this release's")),
        false => Finding::warned(
            "",
            format!("version {version} is loaded, this is {ours}"),
            "install the package of this release, then: sudo rmmod pushgate && sudo modprobe pushgate",
        ),
    }];
    if r.module.devices.is_empty() {
        findings.push(worse(
            "",
            "there is no /dev/pushgate".into(),
            "let udevd or devtmpfs make it; in a container, pass the device in",
        ));
    }
    let mut windows = 0;
    for (path, opened) in &r.module.devices {
        findings.push(match opened {
            Ok((uapi, _)) if *uapi < uapi::PUSHGATE_UAPI_VERSION => worse(
                path,
                format!("it speaks version {uapi}, and this release {}", uapi::PUSHGATE_UAPI_VERSION),
                "install the module of this release",
            ),
            Ok((uapi, window)) => {
                windows += u32::from(*window);
                let what = if *window { "staging and a BAR's window" } else { "staging" };
                Finding::passed(path, format!("opens, has {what}, interface version {uapi}"))
            }
            Err(why) => worse(
                path,
                why.clone(),
                "be in the group pushgate (sudo adduser NAME pushgate), and log in anew",
            ),
        });
    }
    if r.wants.window == Window::Bar && windows == 0 && r.module.devices.iter().all(|(_, o)| o.is_ok()) {
        findings.push(worse(
            "",
            "no PCI function with a window is bound to the module".into(),
            "bind one: echo pushgate > /sys/bus/pci/devices/FUNCTION/driver_override, then echo FUNCTION > /sys/bus/pci/drivers_probe",
        ));
    }
    findings
}
