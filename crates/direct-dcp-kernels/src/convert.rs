//! Conversion of elements on their way into a slot.

/// The bf16 bits of an e4m3 (`e4m3fn`) element times `scale`, rounded to the nearest, ties to even.
/// There is no infinity among e4m3 elements; a NaN stays one.
#[must_use]
#[inline(always)]
pub fn bf16_from_e4m3(element: u8, scale: f32) -> u16 {
    const QUIET_NAN: u32 = 0x7fc0_0000;
    let sign = u32::from(element & 0x80) << 24;
    let magnitude = u32::from(element & 0x7f);
    // The bits at the place of an f32's exponent and mantissa make a number that is 2^120 times too
    // small, for subnormal ones too.
    let value = f32::from_bits(magnitude << 20) * f32::from_bits((120 + 127) << 23) * scale;
    let bits = if magnitude == 0x7f || value.is_nan() {
        QUIET_NAN
    } else {
        value.to_bits()
    };
    // No carry runs into the sign: the largest magnitude that is no NaN is infinity, which has no
    // low bits to round.
    let rounded = bits + 0x7fff + (bits >> 16 & 1);
    ((rounded ^ sign) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the definition of the format, in f64.
    fn reference(element: u8) -> f64 {
        let sign = if element & 0x80 == 0 { 1.0 } else { -1.0 };
        let (exponent, mantissa) = (i32::from(element >> 3 & 15), f64::from(element & 7));
        sign * match (exponent, element & 7) {
            (15, 7) => f64::NAN,
            (0, _) => mantissa / 8.0 * 2_f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2_f64.powi(exponent - 7),
        }
    }

    #[test]
    fn every_element_is_exact_where_the_scale_is_a_power_of_two() {
        for element in 0..=255 {
            for scale in [0.25_f32, 1.0, 8.0] {
                let bits = bf16_from_e4m3(element, scale);
                let value = f64::from(f32::from_bits(u32::from(bits) << 16));
                let expected = reference(element) * f64::from(scale);
                assert!(
                    value == expected || value.is_nan() && expected.is_nan(),
                    "{element:#x} times {scale}: {value}, not {expected}"
                );
                assert_eq!(
                    bits >> 15,
                    u16::from(element >> 7),
                    "the sign of {element:#x}"
                );
            }
        }
    }

    #[test]
    fn products_round_to_the_nearest() {
        for scale in [0.017_3_f32, 1.37, 3.3e-39, 2.9e38] {
            for element in (0..=255).filter(|element| element & 0x7f != 0x7f) {
                let product = (reference(element) * f64::from(scale)) as f32;
                let got = f32::from_bits(u32::from(bf16_from_e4m3(element, scale)) << 16);
                // One step of bf16 at this size.
                let below = f32::from_bits(product.to_bits() & 0xffff_0000);
                let above = f32::from_bits((product.to_bits() & 0xffff_0000) + 0x1_0000);
                let nearest = if (product - below).abs() <= (above - product).abs() {
                    (product - below).abs()
                } else {
                    (above - product).abs()
                };
                assert!(
                    got == product || (got - product).abs() <= nearest,
                    "{element:#x} times {scale}: {got} for {product}"
                );
            }
        }
    }
}
