//! Whether the findings hold: measured again beside what they predict, and the choice
//! beside every way that it could have taken.

use anyhow::{Result, ensure};
use pushgate_pcie_model::Parameters;
use pushgate_pcie_model::choose::{Between, choose};
use pushgate_pcie_model::findings::{Findings, Transfer};
use serde_json::json;

use super::rig::Rig;
use super::{pairs, single, size};

/// What a prediction may be off.
const ALLOWED: f64 = 0.15;
/// What the choice may take more than the best way.
const SLOWER: f64 = 0.05;

/// Measures again what the curves are of, and each device's latencies.
pub fn against(rig: &Rig, found: &Findings, json: bool) -> Result<()> {
    let mut worst = (0.0, String::new());
    let mut row = |device: &str, way: &str, bytes: u64, measured: f64, predicted: f64| {
        let error = predicted / measured - 1.0;
        if error.abs() > worst.0 {
            worst = (error.abs(), format!("{way} of {}", size(bytes)));
        }
        if json {
            let row = json!({
                "check": way, "device": device, "bytes": bytes, "measured_us": measured, "predicted_us": predicted,
                "error": error,
            });
            println!("{row}");
        } else {
            println!(
                "{way:<10} {:>8} {measured:>10.2} us {predicted:>10.2} us {:>8.2} GB/s {:>8.2} GB/s {:>6.1} %",
                size(bytes),
                bytes as f64 / measured / 1e3,
                bytes as f64 / predicted / 1e3,
                error * 100.0
            );
        }
    };
    for (unit, device) in found.devices.iter().enumerate() {
        if !json {
            println!("\n{} at {}, predictions of {}", device.name, device.pci, found.date);
            println!(
                "{:<10} {:>8} {:>13} {:>13} {:>13} {:>13} {:>8}",
                "way", "bytes", "measured", "predicted", "measured", "predicted", "error"
            );
        }
        row(&device.pci, "flag", 8, single::record(rig, unit, 1)?, device.flag);
        row(&device.pci, "record", 64, single::record(rig, unit, 8)?, device.record);
        for line in device.lines.iter().filter(|l| l.way != Transfer::Bounce) {
            for bytes in rig.scale.sizes() {
                let measured = single::time(rig, unit, line.way, bytes)?;
                row(&device.pci, &line.way.to_string(), bytes, measured, line.curve.time(bytes));
            }
        }
    }
    if !json {
        println!("worst: {:.1} % ({}); allowed: {:.0} %", worst.0 * 100.0, worst.1, ALLOWED * 100.0);
    }
    ensure!(
        worst.0 <= ALLOWED,
        "the findings of {} are {:.0} % off for a {}: run `pushgate probe` again on an idle host",
        found.date,
        worst.0 * 100.0,
        worst.1
    );
    Ok(())
}

/// Sends messages of each size every way, and the way that the choice takes, by turns.
pub fn choice(rig: &Rig, found: &Findings, json: bool) -> Result<()> {
    const TURNS: usize = 5;
    let parameters = Parameters::default();
    let mut worst = (0.0, String::new());
    for (from, to) in pairs::all(rig) {
        let (a, b) = (rig.units[from].pci.clone(), rig.units[to].pci.clone());
        let ways = pairs::ways(rig, from, to)?;
        if !json {
            println!("\n{a} to {b}, us (best of {TURNS} medians)");
            print!("{:>8}", "bytes");
            ways.iter().for_each(|w| print!(" {w:>10}"));
            println!(" {:>10} {:>8} {:>7}  chosen", "auto", "GB/s", "ratio");
        }
        for bytes in rig.scale.sizes() {
            let choice = choose(Some(found), &parameters, Between::Devices { from: &a, to: &b }, bytes);
            let chosen = Transfer::from(choice.way);
            let mut times = vec![f64::INFINITY; ways.len()];
            let mut auto = f64::INFINITY;
            for _ in 0..TURNS {
                for (way, best) in ways.iter().zip(&mut times) {
                    *best = best.min(pairs::message(rig, from, to, *way, bytes, rig.scale.time / 2)?);
                }
                auto = auto.min(pairs::message(rig, from, to, chosen, bytes, rig.scale.time / 2)?);
            }
            let best = times.iter().copied().fold(f64::INFINITY, f64::min);
            let ratio = auto / best;
            if ratio - 1.0 > worst.0 {
                worst = (ratio - 1.0, format!("{} from {a} to {b}", size(bytes)));
            }
            if json {
                let each: Vec<_> =
                    ways.iter().zip(&times).map(|(w, us)| json!({"way": w, "us": us})).collect();
                println!(
                    "{}",
                    json!({
                        "choice": chosen, "from": a, "to": b, "bytes": bytes, "auto_us": auto, "ratio": ratio,
                        "ways": each, "reason": choice.reason,
                    })
                );
            } else {
                print!("{:>8}", size(bytes));
                times.iter().for_each(|us| print!(" {us:>10.2}"));
                println!(" {auto:>10.2} {:>8.2} {ratio:>7.3}  {chosen}", bytes as f64 / auto / 1e3);
            }
        }
    }
    if !json {
        println!(
            "worst: {:.1} % slower than the best way; allowed: {:.0} %",
            worst.0 * 100.0,
            SLOWER * 100.0
        );
    }
    ensure!(
        worst.0 <= SLOWER,
        "the choice by the findings of {} is {:.0} % slower than the best way for {}: run `pushgate probe` again on an idle host",
        found.date,
        worst.0 * 100.0,
        worst.1
    );
    Ok(())
}
