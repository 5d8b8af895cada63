//! A small robust fit: positive parameters of any formula to positive readings.
//!
//! Errors are relative, and a reading that is far off has hardly any weight. The loss is first the
//! pseudo-Huber function of the logarithm of predicted over measured, which finds the valley from
//! afar, then Cauchy's function, which ignores outliers. It is minimised over the parameters'
//! logarithms by Nelder and Mead's simplex ("A simplex method for function minimization", The
//! Computer Journal 7, 1965).

/// Up to this relative error, 2 %, an error counts by its square.
const KNEE: f64 = 0.02;

/// One reading: a value at a place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reading {
    /// The place: bytes, say.
    pub at: f64,
    /// The value that was read there; positive.
    pub value: f64,
}

/// Mean loss of a prediction.
fn loss(readings: &[Reading], forgets: bool, predict: impl Fn(f64) -> f64) -> f64 {
    let one = |r: &Reading| {
        let p = predict(r.at);
        // Larger than every real loss, without a NaN in the simplex.
        let error = if p > 0.0 && p.is_finite() { (p / r.value).ln() } else { 1e3 };
        let square = (error / KNEE).powi(2);
        if forgets { square.ln_1p() } else { (1.0 + square).sqrt() - 1.0 }
    };
    readings.iter().map(one).sum::<f64>() / readings.len().max(1) as f64
}

/// Finds the parameters, all positive, with which `formula(parameters, at)` comes nearest to the
/// readings; takes the best of several starts around `guess`. Readings that are not positive
/// numbers are ignored. Returns `guess` if no reading is left.
pub fn fit(readings: &[Reading], guess: &[f64], formula: impl Fn(&[f64], f64) -> f64) -> Vec<f64> {
    let ok = |v: f64| v.is_finite() && v > 0.0;
    let readings: Vec<Reading> = readings.iter().copied().filter(|r| ok(r.at) && ok(r.value)).collect();
    if readings.is_empty() || guess.is_empty() {
        return guess.to_vec();
    }
    let start: Vec<f64> = guess.iter().map(|g| if ok(*g) { g.ln() } else { 0.0 }).collect();
    let mut found = start.clone();
    for forgets in [false, true] {
        let cost = |logs: &[f64]| {
            let p: Vec<f64> = logs.iter().map(|l| l.clamp(-60.0, 60.0).exp()).collect();
            loss(&readings, forgets, |at| formula(&p, at))
        };
        let mut best = (cost(&found), found);
        // Restart from the present best and from the guess, with other first steps: this frees a
        // simplex that has collapsed.
        for step in [0.5, -0.7, 1.5, -0.2, 0.1, 0.03] {
            for from in [start.clone(), best.1.clone()] {
                let next = simplex(&from, step, &cost);
                if next.0 < best.0 {
                    best = next;
                }
            }
        }
        found = best.1;
    }
    found.iter().map(|l| l.clamp(-60.0, 60.0).exp()).collect()
}

fn simplex(from: &[f64], step: f64, cost: &impl Fn(&[f64]) -> f64) -> (f64, Vec<f64>) {
    let n = from.len();
    let mut points: Vec<(f64, Vec<f64>)> = (0..=n)
        .map(|i| {
            let mut p = from.to_vec();
            if i > 0 {
                p[i - 1] += step;
            }
            (cost(&p), p)
        })
        .collect();
    for _ in 0..400 * n {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        if points[n].0 - points[0].0 < 1e-12 {
            break;
        }
        let centre: Vec<f64> =
            (0..n).map(|k| points[..n].iter().map(|(_, p)| p[k]).sum::<f64>() / n as f64).collect();
        let along = |t: f64, worst: &[f64]| {
            let p: Vec<f64> = centre.iter().zip(worst).map(|(c, w)| c + t * (w - c)).collect();
            (cost(&p), p)
        };
        let reflected = along(-1.0, &points[n].1);
        if reflected.0 < points[0].0 {
            let expanded = along(-2.0, &points[n].1);
            points[n] = if expanded.0 < reflected.0 { expanded } else { reflected };
        } else if reflected.0 < points[n - 1].0 {
            points[n] = reflected;
        } else {
            let contracted = along(if reflected.0 < points[n].0 { -0.5 } else { 0.5 }, &points[n].1);
            if contracted.0 < points[n].0.min(reflected.0) {
                points[n] = contracted;
            } else {
                let first = points[0].1.clone();
                for (value, p) in &mut points[1..] {
                    p.iter_mut().zip(&first).for_each(|(x, f)| *x = f + 0.5 * (*x - f));
                    *value = cost(p);
                }
            }
        }
    }
    points.swap_remove(
        (0..=n).min_by(|a, b| points[*a].0.total_cmp(&points[*b].0)).expect("a simplex has points"),
    )
}

/// The largest relative error of a prediction, |predicted / measured - 1|, and the place where it
/// occurs.
pub fn worst(readings: &[Reading], predict: impl Fn(f64) -> f64) -> Option<(f64, f64)> {
    readings.iter().map(|r| ((predict(r.at) / r.value - 1.0).abs(), r.at)).max_by(|a, b| a.0.total_cmp(&b.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_to_fit_leaves_the_guess() {
        let line = |p: &[f64], at: f64| p[0] + at * p[1];
        assert_eq!(fit(&[], &[1.0, 2.0], line), [1.0, 2.0]);
        let bad = [Reading { at: 1.0, value: -1.0 }, Reading { at: f64::NAN, value: 1.0 }];
        assert_eq!(fit(&bad, &[1.0, 2.0], line), [1.0, 2.0]);
        assert_eq!(fit(&[Reading { at: 1.0, value: 1.0 }], &[], line), [0.0; 0]);
    }

    #[test]
    fn a_far_guess_finds_the_line() {
        let readings: Vec<Reading> =
            (0..12).map(|i| 4f64.powi(i)).map(|at| Reading { at, value: 2.5 + at * 0.02 }).collect();
        let p = fit(&readings, &[100.0, 1.0], |p, at| p[0] + at * p[1]);
        assert!((p[0] / 2.5 - 1.0).abs() < 1e-3 && (p[1] / 0.02 - 1.0).abs() < 1e-3, "{p:?}");
        assert!(worst(&readings, |at| p[0] + at * p[1]).unwrap().0 < 1e-3);
    }
}
