//! Whether the findings hold: measured again beside what they predict, and the choice
//! beside every way that it could have taken.

use std::time::Instant;

use anyhow::{Result, ensure};
use pushgate_pcie_model::choose::{Between, choose};
use pushgate_pcie_model::findings::{Findings, Transfer};
use pushgate_pcie_model::{Parameters, Way};
use serde_json::json;

use super::rig::Rig;
use super::{pairs, single, size};
use crate::output::{out, outln};

/// What a prediction may be off.
const ALLOWED: f64 = 0.15;
/// What the choice may take more than the best way.
const SLOWER: f64 = 0.05;

/// Measures again what the curves are of, and each device's latencies.
pub fn against(rig: &Rig, found: &Findings, json: bool) -> Result<()> {
    let mut worst = (0.0, String::new());
    let mut row = |device: &str, way: &str, bytes: u64, measured: f64, predicted: f64| -> Result<()> {
        let error = predicted / measured - 1.0;
        if error.abs() > worst.0 {
            worst = (error.abs(), format!("{way} of {}", size(bytes)));
        }
        if json {
            let row = json!({
                "check": way, "device": device, "bytes": bytes, "measured_us": measured, "predicted_us": predicted,
                "error": error,
            });
            outln!("{row}")?;
        } else {
            outln!(
                "{way:<10} {:>8} {measured:>10.2} us {predicted:>10.2} us {:>8.2} GB/s {:>8.2} GB/s {:>6.1} %",
                size(bytes),
                bytes as f64 / measured / 1e3,
                bytes as f64 / predicted / 1e3,
                error * 100.0
            )?;
        }
        Ok(())
    };
    let mut seen = 0;
    for device in &found.devices {
        // CUDA_VISIBLE_DEVICES may hide some of those that were measured.
        let Some(unit) = rig.units.iter().position(|u| u.pci == device.pci) else {
            tracing::warn!(
                "{} at {} is in the findings and not seen here: not checked",
                device.name,
                device.pci
            );
            continue;
        };
        seen += 1;
        if !json {
            outln!("\n{} at {}, predictions of {}", device.name, device.pci, found.date)?;
            outln!(
                "{:<10} {:>8} {:>13} {:>13} {:>13} {:>13} {:>8}",
                "way",
                "bytes",
                "measured",
                "predicted",
                "measured",
                "predicted",
                "error"
            )?;
        }
        for line in device.lines.iter().filter(|l| l.way != Transfer::Bounce) {
            for bytes in rig.scale.sizes() {
                let measured = single::time(rig, unit, line.way, bytes)?;
                row(&device.pci, &line.way.to_string(), bytes, measured, line.curve.time(bytes))?;
            }
        }
        // Last, as in the probe: clocks are up by then.
        row(&device.pci, "flag", 8, single::record(rig, unit, 1)?, device.flag)?;
        row(&device.pci, "record", 64, single::record(rig, unit, 8)?, device.record)?;
    }
    ensure!(
        seen > 0,
        "the findings of {} have none of the devices seen here: run `pushgate probe` again",
        found.date
    );
    if !json {
        outln!("worst: {:.1} % ({}); allowed: {:.0} %", worst.0 * 100.0, worst.1, ALLOWED * 100.0)?;
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

/// Sends messages of each size every way, and the way that the choice takes, by turns:
/// out of all ways, and out of those that need no access to a peer's memory.
pub fn choice(rig: &Rig, found: &Findings, json: bool) -> Result<()> {
    // The middle one counts: a kernel's launch finds one of several places, and times differ.
    const TURNS: usize = 9;
    let parameters = Parameters::default();
    let mut worst = (0.0, String::new());
    let mut seen = 0;
    for (from, to) in pairs::all(rig) {
        let (a, b) = (rig.units[from].pci.clone(), rig.units[to].pci.clone());
        // Without figures there is no choice to be judged.
        if !found.pairs.iter().any(|p| p.from == a && p.to == b) {
            tracing::warn!("the findings have no messages from {a} to {b}: not tried");
            continue;
        }
        seen += 1;
        let all: Vec<Way> =
            Way::ALL.into_iter().filter(|way| *way != Way::Pull || pairs::reaches(rig, to, from)).collect();
        let sets = [all.clone(), vec![Way::Push, Way::Bounce]];
        let sets = &sets[..if all.contains(&Way::Pull) { 2 } else { 1 }];
        if !json {
            outln!("\n{a} to {b}, us (median of {TURNS} launches' medians at most)")?;
            let ways: String = all.iter().map(|way| format!(" {:>9}", way.to_string())).collect();
            let auto = format!("{:>9} {:>8} {:>6}", "auto", "GB/s", "ratio");
            outln!("{:>8}{ways}   {auto} chosen   without peer access", "bytes")?;
        }
        for bytes in rig.scale.sizes() {
            let ends = Between::Devices { from: &a, to: &b };
            let choices: Vec<_> =
                sets.iter().map(|can| choose(Some(found), &parameters, ends, can, bytes)).collect();
            let (mut times, mut autos) = (vec![Vec::new(); all.len()], vec![Vec::new(); sets.len()]);
            let share = (4.0 / pairs::all(rig).len() as f64).clamp(0.1, 0.5);
            let time = rig.scale.time.mul_f64(share);
            let send = |way: Way| pairs::message(rig, from, to, way.into(), bytes, time);
            let began = Instant::now();
            for turn in 0..TURNS {
                if turn >= 2 && began.elapsed() > 2 * pairs::PATIENCE {
                    break;
                }
                for (way, times) in all.iter().zip(&mut times) {
                    times.push(send(*way)?);
                }
                for (choice, times) in choices.iter().zip(&mut autos) {
                    times.push(send(choice.way)?);
                }
            }
            let times: Vec<f64> = times.into_iter().map(pairs::median).collect();
            let autos: Vec<f64> = autos.into_iter().map(pairs::median).collect();
            let mut ratios = Vec::new();
            for (can, auto) in sets.iter().zip(&autos) {
                let of = all.iter().zip(&times).filter(|(way, _)| can.contains(way));
                let ratio = auto / of.map(|(_, us)| *us).fold(f64::INFINITY, f64::min);
                ratios.push(ratio);
                if ratio - 1.0 > worst.0 {
                    worst = (ratio - 1.0, format!("{} from {a} to {b}", size(bytes)));
                }
            }
            if json {
                let each: Vec<_> =
                    all.iter().zip(&times).map(|(w, us)| json!({"way": w, "us": us})).collect();
                for (choice, (auto, ratio)) in choices.iter().zip(autos.iter().zip(&ratios)) {
                    let row = json!({
                        "choice": choice.way, "from": a, "to": b, "bytes": bytes, "auto_us": auto, "ratio": ratio,
                        "ways": each, "reason": choice.reason,
                    });
                    outln!("{row}")?;
                }
            } else {
                let times: String = times.iter().map(|us| format!(" {us:>9.2}")).collect();
                out!("{:>8}{times}", size(bytes))?;
                for (choice, (auto, ratio)) in choices.iter().zip(autos.iter().zip(&ratios)) {
                    out!(
                        "   {auto:>9.2} {:>8.2} {ratio:>6.3} {:<6}",
                        bytes as f64 / auto / 1e3,
                        choice.way.to_string()
                    )?;
                }
                outln!()?;
            }
        }
    }
    ensure!(
        seen > 0,
        "the findings of {} have no messages between devices seen here: run `pushgate probe` again",
        found.date
    );
    if !json {
        outln!("worst: {:.1} % slower than the best way; allowed: {:.0} %", worst.0 * 100.0, SLOWER * 100.0)?;
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
