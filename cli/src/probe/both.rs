//! Devices that store to and load from host memory at once, by the bytes under way in all:
//! how much memory may lie between them before it costs their rate.

use std::time::Instant;

use anyhow::Result;
use pushgate_gpu_kernels::Running;
use pushgate_pcie_model::findings::Both;

use super::Bar;
use super::pairs::PATIENCE;
use super::rig::{CopyParams, Rig, STREAMS};

/// A message is no longer. After each one the blocks meet, and for that time, some microseconds,
/// a kernel moves nothing. A message of 128 KiB takes as long, and so would measure the meetings;
/// one of this size takes 50 us.
const LONGEST: u64 = 2 << 20;

/// A message is a multiple of this.
const PAGE: u64 = 4096;

/// Of one launch. The first and the last are not counted: other kernels begin later than this
/// one, or have ended.
const BATCHES: usize = 8;

/// How the bytes under way are cut: each device stores to its own part of host memory, message
/// after message from the part's start to its end and then again.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cut {
    /// Bytes of a message.
    message: u64,
    /// Messages in a part.
    places: u64,
    /// Parts in one of the two host buffers.
    in_buffer: usize,
}

impl Cut {
    /// `None` where two host buffers of `most` bytes cannot hold that many parts.
    fn of(total: u64, devices: usize, most: u64) -> Option<Self> {
        let part = total / devices as u64;
        if part < PAGE {
            return None;
        }
        let places = part.div_ceil(LONGEST);
        let message = part / places / PAGE * PAGE;
        let in_buffer = (most / (message * places)) as usize;
        (2 * in_buffer >= devices).then_some(Self { message, places, in_buffer })
    }

    fn part(&self) -> u64 {
        self.message * self.places
    }

    /// The host buffer that a device's part is in, and where it begins there.
    fn place(&self, device: usize) -> (usize, u64) {
        (device / self.in_buffer, (device % self.in_buffer) as u64 * self.part())
    }
}

/// How many devices are measured at once: one, two and all.
pub fn counts(rig: &Rig) -> Vec<usize> {
    let all = rig.units.len();
    let mut counts: Vec<usize> = [1, 2, all].into_iter().filter(|n| *n <= all).collect();
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// Measures the first `devices` devices at once, for each number of bytes under way that the host buffers
/// hold.
pub fn both(rig: &Rig, devices: usize, bar: &Bar) -> Result<Vec<Both>> {
    bar.say(&format!("{devices} at once, both ways"));
    let cuts = rig.scale.totals.iter().filter_map(|t| Some((*t, Cut::of(*t, devices, rig.scale.most)?)));
    cuts.map(|(bytes, cut)| Ok(Both { devices: devices as u32, bytes, rate: rate(rig, devices, &cut)? }))
        .collect()
}

/// GB/s of each device, each way: the best of three launches.
fn rate(rig: &Rig, devices: usize, cut: &Cut) -> Result<f64> {
    // All kernels move the same bytes. A batch is once through the part at least, so that the
    // first one has brought caches into the state that they stay in.
    let repeat = (rig.scale.most / 2).max(cut.part()).div_ceil(cut.message);
    let moved = (BATCHES as u64 - 2) * repeat * cut.message;
    let (began, mut best) = (Instant::now(), 0f64);
    for turn in 0..3 {
        if turn > 0 && began.elapsed() > PATIENCE {
            break;
        }
        rig.go_on()?;
        best = best.max(moved as f64 / slowest(rig, devices, cut, repeat)?);
    }
    Ok(best)
}

/// Nanoseconds of the batches that count, of the kernel for which they took longest.
fn slowest(rig: &Rig, devices: usize, cut: &Cut, repeat: u64) -> Result<f64> {
    let common = CopyParams {
        bytes: cut.message,
        stride: cut.message,
        places: cut.places,
        width: 16,
        batches: BATCHES as u64,
        repeat,
        ..Default::default()
    };
    let mut running: Vec<(usize, usize, Running)> = Vec::new();
    for device in 0..devices {
        let u = &rig.units[device];
        let (buffer, at) = cut.place(device);
        let out = CopyParams { dst: u.host(buffer) + at, src: u.memory.addr(), system: 1, ..common };
        // What the next device stores; of a single device its own.
        let (buffer, at) = cut.place((device + 1) % devices);
        let back = CopyParams { dst: u.second(&rig.scale), src: u.host(buffer) + at, ..common };
        let storing = rig.scale.blocks.div_ceil(STREAMS as u32);
        running.push((device, 0, rig.copy(device, 0, storing, out)?));
        running.push((device, 1, rig.copy(device, 1, rig.scale.blocks, back)?));
    }
    let mut slowest = 0f64;
    for (unit, stream, run) in &running {
        let ns = rig.results(*unit, *stream, run, BATCHES as u64)?;
        slowest = slowest.max(ns[1..BATCHES - 1].iter().sum());
    }
    // A clock with coarse steps may show no time for short messages.
    Ok(slowest.max(1.0))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use pushgate::DeviceChoice;
    use pushgate_gpu_kernels::choose;

    use super::*;
    use crate::probe::rig::{pattern, read_host};

    #[test]
    fn each_device_stores_to_its_part_and_loads_what_the_next_one_stores() {
        // The CPU three times, as three devices.
        let executors = (0..3).map(|_| choose(DeviceChoice::Cpu).unwrap().0).collect();
        let rig = Rig::new(executors).unwrap();
        assert_eq!(counts(&rig), [1, 2, 3]);
        let sent: Vec<Vec<u8>> = (0..3).map(|i| pattern(rig.scale.most as usize, i)).collect();
        for devices in counts(&rig) {
            for host in &rig.buffers {
                let words = host.memory.words(0, rig.scale.most as usize / 8);
                words.iter().for_each(|word| word.store(0, Ordering::Release));
            }
            for (unit, sent) in rig.units.iter().zip(&sent) {
                unit.memory.copy_from_host(sent).unwrap();
            }
            let total = if devices == 2 { 2 * rig.scale.most } else { rig.scale.most };
            let cut = Cut::of(total, devices, rig.scale.most).unwrap();
            let part = cut.part() as usize;
            // The second time all is stored already that is loaded.
            for _ in 0..2 {
                let rate = rate(&rig, devices, &cut).unwrap();
                assert!(rate > 0.0 && rate.is_finite(), "{rate}");
            }
            for (device, sent) in sent.iter().enumerate().take(devices) {
                let (buffer, at) = cut.place(device);
                let stored = read_host(&rig.buffers[buffer], at as usize, part);
                assert!(stored == sent[..part], "{devices}: {device} stored something else");
                let before = (device + devices - 1) % devices;
                let mut loaded = vec![0; part];
                rig.units[before].memory.copy_to_host_at(rig.scale.most as usize, &mut loaded).unwrap();
                assert!(loaded == sent[..part], "{devices}: {before} loaded something else");
            }
        }
        let rows = both(&rig, 3, &Bar::new(0, true).unwrap()).unwrap();
        let found: Vec<(u32, u64)> = rows.iter().map(|b| (b.devices, b.bytes)).collect();
        assert_eq!(found, [(3, 1 << 20), (3, 4 << 20)]);
    }

    #[test]
    fn parts_are_in_the_buffers_and_apart() {
        let most = 64 << 20;
        for devices in 1..=16 {
            for total in (22..=27).map(|i| 1u64 << i) {
                let Some(cut) = Cut::of(total, devices, most) else {
                    // One part, or parts that leave a rest of each buffer.
                    assert!(total == 2 * most && (devices == 1 || 128 % devices != 0), "{devices} {total}");
                    continue;
                };
                assert!(cut.message <= LONGEST && cut.message.is_multiple_of(PAGE), "{cut:?}");
                // Nearly all of the bytes, and no more.
                let all = cut.part() * devices as u64;
                assert!(all <= total && all * 100 >= total * 97, "{devices} {total} {cut:?}");
                let places: Vec<(usize, u64)> = (0..devices).map(|device| cut.place(device)).collect();
                assert!(
                    places.iter().all(|(buffer, at)| *buffer < 2 && at + cut.part() <= most),
                    "{places:?}"
                );
                assert!(
                    places.windows(2).all(|p| p[0].0 < p[1].0 || p[0].1 + cut.part() <= p[1].1),
                    "{places:?}"
                );
            }
        }
        let cut = Cut::of(128 << 20, 2, most);
        assert_eq!(cut, Some(Cut { message: LONGEST, places: 32, in_buffer: 1 }));
        assert_eq!(Cut::of(4 << 20, 4, most), Some(Cut { message: 1 << 20, places: 1, in_buffer: 64 }));
        assert_eq!(Cut::of(4096, 2, most), None);
    }
}
