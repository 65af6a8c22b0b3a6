//! Selections by a total order: value descending, index ascending.

use std::cmp::Ordering;

/// Compares (value, index) pairs: larger values first, then smaller indices. +0 and −0 are equal;
/// NaN has some fixed place.
fn order(a: (f32, u32), b: (f32, u32)) -> Ordering {
    (b.0 + 0.0).total_cmp(&(a.0 + 0.0)).then(a.1.cmp(&b.1))
}

/// The indices of the `k` first values in the total order, best first; all of them if there are
/// fewer. `out` is cleared first.
pub fn top_k(values: &[f32], k: usize, out: &mut Vec<u32>) {
    out.clear();
    let k = k.min(values.len());
    if k == 0 {
        return;
    }
    out.extend(0..values.len() as u32);
    let key = |i: u32| (values[i as usize], i);
    if k < out.len() {
        out.select_nth_unstable_by(k - 1, |&a, &b| order(key(a), key(b)));
        out.truncate(k);
    }
    out.sort_unstable_by(|&a, &b| order(key(a), key(b)));
}

/// The index of the largest value, the lowest of equals; 0 for no value.
#[must_use]
pub fn argmax(values: &[f32]) -> usize {
    let mut best = 0;
    for (i, &value) in values.iter().enumerate() {
        if value > values[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lower_index() {
        let values = [1.0, 3.0, -0.0, 3.0, 0.0, 2.0];
        let mut out = Vec::new();
        top_k(&values, 3, &mut out);
        assert_eq!(out, [1, 3, 5]);
        top_k(&values, 6, &mut out);
        assert_eq!(out, [1, 3, 5, 0, 2, 4]);
        top_k(&values, 9, &mut out);
        assert_eq!(out.len(), 6);
        assert_eq!(argmax(&values), 1);
        top_k(&[], 2, &mut out);
        assert!(out.is_empty());
    }
}
