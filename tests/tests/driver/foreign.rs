//! Devices of other drivers, bound to the module by hand: refused unless the administrator says which BAR is memory, and unharmed
//! either way.

use std::fs;
use std::path::Path;
use std::process::Command;

use pushgate_driver_shim::kmod::Device;
use pushgate_driver_shim::uapi;
use pushgate_tests::wait_until;
use rustix::io::Errno;

use crate::harness::{PAGE, alone, errno, load, log, module, open_to_all, other_than, quiet};

const DRIVER: &str = "/sys/bus/pci/drivers/pushgate";

/// A device with a driver of its own.
struct Foreign {
    /// The name of its own driver, which is a module's.
    driver: &'static str,
    /// Vendor and device, as `new_id` takes them.
    ids: &'static str,
    /// Its address, such as 0000:01:00.0.
    address: String,
}

impl Foreign {
    fn find(driver: &'static str, ids: &'static str) -> Foreign {
        let is_it = |folder: &Path| {
            let id = |name: &str| fs::read_to_string(folder.join(name)).unwrap().trim()[2..].to_string();
            format!("{} {}", id("vendor"), id("device")) == ids
        };
        let mut folders = fs::read_dir("/sys/bus/pci/devices").unwrap().flatten();
        let folder = folders.find(|entry| is_it(&entry.path())).expect("the machine has one");
        Foreign { driver, ids, address: folder.file_name().into_string().unwrap() }
    }

    fn network_card() -> Foreign {
        Foreign::find("e1000e", "8086 10d3")
    }

    fn disk() -> Foreign {
        Foreign::find("nvme", "1b36 0010")
    }

    fn file(&self, name: &str) -> String {
        format!("/sys/bus/pci/devices/{}/{name}", self.address)
    }

    fn bound_to(&self) -> Option<String> {
        let driver = fs::read_link(self.file("driver")).ok()?;
        Some(driver.file_name().unwrap().to_str().unwrap().to_string())
    }

    fn unbind(&self) {
        if self.bound_to().is_some() {
            fs::write(self.file("driver/unbind"), &self.address).unwrap();
        }
    }

    /// Takes the device from its driver and offers it to another by driver_override.
    fn offer_to(&self, driver: &str) {
        self.unbind();
        fs::write(self.file("driver_override"), driver).unwrap();
        fs::write("/sys/bus/pci/drivers_probe", &self.address).unwrap();
    }

    /// The device works under its own driver.
    fn works(&self) {
        assert!(module("modprobe", &[self.driver]));
        self.offer_to(self.driver);
        assert_eq!(self.bound_to().as_deref(), Some(self.driver));
        match self.driver {
            "e1000e" => {
                let link = fs::read_dir(self.file("net")).unwrap().flatten().next().expect("a link");
                let name = link.file_name().into_string().unwrap();
                let ip = |state| Command::new("ip").args(["link", "set", &name, state]).status().unwrap();
                assert!(ip("up").success() && ip("down").success());
            }
            _ => {
                wait_until("the disk is back", || disks().len() == 1);
                assert_eq!(fs::read(format!("/dev/{}", disks()[0])).unwrap(), [0; 1 << 20]);
            }
        }
    }

    /// Leaves the device without a driver, as before the test.
    fn leave(&self) {
        self.unbind();
        fs::write(self.file("driver_override"), "\n").unwrap();
    }

    /// The device's file in /dev.
    fn device(&self) -> Option<String> {
        let folder = fs::read_dir(self.file("pushgate")).ok()?;
        Some(format!("/dev/{}", folder.flatten().next()?.file_name().to_str()?))
    }

    /// The pages of a BAR that hold the MSI-X table or its pending bits, by what the device itself says.
    fn msix_pages(&self, bar: u32) -> Vec<usize> {
        let config = fs::read(self.file("config")).unwrap();
        let mut at = usize::from(config[0x34]);
        while config[at] != 0x11 {
            at = usize::from(config[at + 1]);
        }
        let word = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
        let vectors = (word(at) >> 16 & 0x7ff) as usize + 1;
        let mut pages = Vec::new();
        for (place, bytes) in [(word(at + 4), vectors * 16), (word(at + 8), vectors.div_ceil(64) * 8)] {
            let start = (place & !7) as usize;
            if place & 7 == bar {
                pages.extend(start / PAGE..(start + bytes).div_ceil(PAGE));
            }
        }
        pages
    }
}

/// The names of NVMe disks.
fn disks() -> Vec<String> {
    let names = fs::read_dir("/sys/block").unwrap().flatten().map(|e| e.file_name().into_string().unwrap());
    names.filter(|name| name.starts_with("nvme")).collect()
}

/// Loads the module again, with these options.
fn reload(options: &[&str]) {
    quiet();
    assert!(module("rmmod", &["pushgate"]));
    load(options);
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn a_device_of_unknown_layout_is_refused_and_unharmed() {
    let Some(_guard) = alone() else { return };
    for device in [Foreign::network_card(), Foreign::disk()] {
        device.works();
        let said = || {
            let word =
                format!("pushgate {}: the BARs of a device {}", device.address, device.ids.replace(' ', ":"));
            let log = log();
            let lines = log.lines().filter(|line| line.contains(&word));
            lines.filter(|line| line.contains("(BAR ") && line.contains("window_bar")).count()
        };
        device.offer_to("pushgate");
        assert_eq!((device.bound_to(), said()), (None, 1));
        device.works();
        device.leave();
        fs::write(format!("{DRIVER}/new_id"), device.ids).unwrap();
        assert_eq!((device.bound_to(), said()), (None, 2));
        fs::write(format!("{DRIVER}/remove_id"), device.ids).unwrap();
        device.works();
        device.leave();
    }
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn slices_avoid_the_msix_table_and_the_holes_that_are_named() {
    let Some(_guard) = alone() else { return };
    // The network card's BAR 3 has its table and pending bits in two pages of four, the disk's BAR 0 both and registers.
    for (device, bar, named) in [
        (Foreign::network_card(), 3, ""),
        (Foreign::network_card(), 3, "0x3ff0,1"),
        (Foreign::disk(), 0, "0,8192"),
    ] {
        let msix = device.msix_pages(bar);
        assert!(!msix.is_empty());
        device.works();
        let options = [format!("window_bar={bar}"), format!("window_holes={named}")];
        let options: Vec<_> =
            options.iter().map(String::as_str).filter(|option| !option.ends_with('=')).collect();
        reload(&options);
        device.offer_to("pushgate");
        let file = device.device().expect("bound");
        let info = Device::open(&file).unwrap().info().unwrap();
        assert!(info.vectors > 0, "interrupts work although their table is in the BAR");
        let is_named = |page: &usize| match named {
            "" => false,
            "0,8192" => *page < 2,
            _ => *page == 3,
        };
        let pages = 0..info.window_bytes as usize / PAGE;
        let free: Vec<_> = pages.filter(|page| !msix.contains(page) && !is_named(page)).collect();
        let devices: Vec<_> = free.iter().map(|_| Device::open(&file).unwrap()).collect();
        // Not mapped, because what this process had mapped would hold the module.
        let slices: Vec<_> = devices.iter().map(|device| device.slice(PAGE, 0).unwrap()).collect();
        let places: Vec<_> = slices.iter().map(|slice| slice.offset as usize / PAGE).collect();
        assert_eq!(places, free, "{} with holes {named:?}", device.driver);
        assert_eq!(errno(Device::open(&file).unwrap().slice(PAGE, 0)), Errno::NOSPC);
        drop(slices);
        drop(devices);
        if free.len() > 1 {
            let whole = Device::open(&file).unwrap();
            assert_eq!(errno(whole.slice(free.len() * PAGE, 0)), Errno::NOSPC, "they are not one piece");
        }
        device.works();
        device.leave();
    }
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn a_device_that_is_reset_after_an_error_comes_back_as_a_new_function() {
    let Some(_guard) = alone() else { return };
    assert!(module("modprobe", &["aer_inject"]));
    let card = Foreign::network_card();
    reload(&["window_bar=3"]);
    card.offer_to("pushgate");
    open_to_all();
    let file = card.device().expect("bound");
    let device = Device::open(&file).unwrap();
    let status = device.status().unwrap();
    let slice = device.slice(PAGE, 0).unwrap();
    assert_eq!(other_than(&slice.map().unwrap(), 0), None);
    let inject = |uncorrectable: u32, correctable: u32| {
        // struct aer_error_inj: bus, device, function; statuses; four words of a header; domain.
        let number = |from: usize| u8::from_str_radix(&card.address[from..from + 2], 16).unwrap();
        let mut error = vec![number(5), number(8), 0, 0];
        error.extend([uncorrectable, correctable, 0, 0, 0, 0, 0].iter().flat_map(|word| word.to_ne_bytes()));
        fs::write("/dev/aer_inject", error).unwrap();
    };
    // Malformed TLP is fatal: the link is reset.
    inject(1 << 18, 0);
    wait_until("the function is gone", || status.function() == uapi::PUSHGATE_FUNCTION_GONE);
    assert_eq!(errno(device.ring(0)), Errno::NODEV);
    wait_until("the function is back", || {
        card.device().is_some_and(|file| Device::open(file).is_ok_and(|device| device.slice(PAGE, 0).is_ok()))
    });
    assert_eq!(errno(slice.map()), Errno::NODEV, "the file's own function stays gone");
    drop(device);
    card.works();
    card.leave();
}
